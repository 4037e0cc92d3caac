"""`Prompt`: what the whole prompt of a request tells one layer, taken in chunk after chunk."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.observation import Needs
from keepset.kernels.columns import ColumnAccumulator
from keepset.kernels.moments import Moments


def looks_at_all(needs: Needs) -> bool:
    """Whether what is needed takes every token of a prompt."""
    return bool(needs.hidden_states or needs.columns)


class Prompt:
    """Streamed statistics of one layer.

    Attributes:
        queries, hidden: moments of queries before rotation and of hidden states, by the number of skipped tokens.
        columns: of the prompt's attention.
    """

    def __init__(self, needs: Needs) -> None:
        self.queries = {skip: Moments() for skip in needs.query_moments}
        self.hidden = {skip: Moments() for skip in needs.hidden_moments}
        self.columns = ColumnAccumulator(needs.columns)

    def add_queries(self, queries: Float[Tensor, "1 query_heads n head_dim"], positions: Int[Tensor, "1 n"]) -> None:
        """Takes in queries as they were before rotation."""
        for skip, moments in self.queries.items():
            moments.add(queries, positions >= skip, full=True)

    def add_hidden(self, hidden: Float[Tensor, "n hidden"], positions: Int[Tensor, "1 n"]) -> None:
        """Takes in hidden states that enter the layer's attention."""
        for skip, moments in self.hidden.items():
            moments.add(hidden[None, None].float(), positions >= skip, full=False)


@dataclass
class Prompts:
    """The same of every layer of a group, for one request.

    Attributes:
        layers: one after another.
        tokens: of the prompt that were seen, from its first on.
    """

    layers: list[Prompt]
    tokens: int = 0
