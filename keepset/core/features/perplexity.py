"""`Perplexity`: how well the model foretold a prompt's newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from keepset.core.feature import Feature


@dataclass(frozen=True)
class Perplexity(Feature[Float[Tensor, " batch"]]):
    """Perplexity of the prompt's newest tokens by the model's own logits, `[batch]`; infinite where none is foretold.

    Attributes:
        tokens: of how many.
    """

    label = "perplexity of the newest tokens"
    prompt_only = "looks at the prompt's perplexity, and only there"
    transformers_only = "looks at the prompt's perplexity, which attention layers do not see"

    tokens: int
