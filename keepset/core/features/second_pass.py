"""`SecondPass`: what entries receive of tokens that run once more on top of the prompt's whole cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.feature import Feature
from keepset.core.features.attention_columns import PROMPT_ATTENTION
from keepset.kernels.columns import ColumnStatistic


@dataclass(frozen=True, eq=False)
class SecondPassColumns:
    """What every entry of the prompt received in a second pass.

    Attributes:
        statistics: by their names, one number per query head and entry; zero where an entry received nothing.
        tokens: how many tokens have looked at the entries.
        opening: how many of the first entries were not asked about, because they are the chat template's; none, where
            nothing is said.
    """

    statistics: Mapping[ColumnStatistic, Float[Tensor, "batch query_heads entries"]]
    tokens: Int[Tensor, " batch"]
    opening: Int[Tensor, " batch"] | None = None


@dataclass(frozen=True)
class SecondPass(Feature[SecondPassColumns]):
    """Tokens that run once more on top of the prompt's whole cache, for the attention that they pay to it.

    They are the task's tokens where some were given to the cache, else the prompt's own. Nothing of them stays.

    Attributes:
        statistics: of the columns of that attention.
        chunk: how many tokens of the prompt run together; those of a chunk see the whole prompt and one another, and
            each chunk follows the prompt anew. 0: all of them.
        repeat: every chunk comes after words that ask to repeat it, and the statistics are of a softmax over nothing
            but itself, these words, the first few entries and the chunk's, each of which is looked at once (KVzip).
    """

    label = "a second pass"
    prompt_only = PROMPT_ATTENTION
    transformers_only = "has tokens look at the prompt a second time, for which {engine} has no step"

    statistics: frozenset[ColumnStatistic]
    chunk: int = 0
    repeat: bool = False

    @property
    def cost(self) -> SecondPass:
        """The pass, whatever is asked of it: such passes are run as one."""
        return replace(self, statistics=frozenset())
