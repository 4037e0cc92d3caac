"""`Accumulator`: collects what a method can look at, chunk by chunk, in the same way under every runtime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.shapes import HiddenStates, Queries, QueryHeadScores
from keepset.kernels.dispatch import upload

Turn = Callable[[Tensor], Tensor]
"""From rows `[batch, query_heads, n, head_dim]` before rotation to the same at some rotation."""

RequestKeys = Sequence[tuple[Float[Tensor, "kv_heads _ head_dim"], Tensor | slice]]
"""For every request the keys of its valid entries, and which of a chunk's queries are its own."""


class QuerySource(ABC):
    """What knows how a layer makes its queries and rotates them."""

    @property
    @abstractmethod
    def hidden(self) -> HiddenStates:
        """Hidden states that entered the layer's attention with this chunk."""

    @abstractmethod
    def undo(self, queries: Queries, positions: Int[Tensor, "batch n"]) -> Queries:
        """This chunk's queries as they were before rotation, float32."""

    @abstractmethod
    def ahead(self, lengths: Int[Tensor, " batch"], future: int) -> Turn:
        """Rotates rows by the mean rotation of the `future` positions from each request's length on."""

    @abstractmethod
    def queries(self, hidden: HiddenStates, lengths: Int[Tensor, " batch"], future: int) -> Queries:
        """Queries that the layer makes of other hidden states, at that rotation."""

    def merged_with(self, others: Sequence[Self]) -> QuerySource:
        """What knows it of this one's requests and of others' after them; of one layer any of them does."""
        return self


@dataclass(frozen=True, eq=False)
class Chunk:
    """What one step brings to one layer: `n` new tokens after those that came before.

    Attributes:
        queries: after rotation.
        entries: makes the entries so far, this chunk's included, for whom wants to see them.
        positions, valid: of the new tokens; valid is None when all are.
        scaling: what the model multiplies query-key products with.
        lse: log-sum-exp of every query's logits where attention computed it already.
        source: where somebody looks at queries before rotation or at hidden states.
        start: the first token's position, where it is every request's and the host knows it.
        host_positions: the positions on the host where it knows them otherwise; negative for tokens that do not exist.
    """

    queries: Queries
    entries: Callable[[], RequestKeys]
    positions: Int[Tensor, "batch n"]
    valid: Bool[Tensor, "batch n"] | None
    scaling: float
    lse: list[Tensor] | None = None
    source: QuerySource | None = None
    start: int | None = None
    host_positions: Int[Tensor, "batch n"] | None = None

    def every(self, stride: int, request: int) -> Tensor | slice:
        """Which of a request's tokens have positions that are multiples of this."""
        if self.start is not None:
            return slice(-self.start % stride, None, stride)
        if self.host_positions is None:
            return self.counted(0)[request] & (self.positions[request] % stride == 0)
        chosen = (self.host_positions[request] >= 0) & (self.host_positions[request] % stride == 0)
        return upload(chosen.nonzero()[:, 0], self.positions.device)

    def counted(self, skip: int) -> Bool[Tensor, "batch n"]:
        """Which of the tokens exist and are not among the first `skip`."""
        counted = self.positions >= skip
        return counted if self.valid is None else counted & self.valid


class Accumulator(ABC):
    """Collects all features of one kind, each once. What `add` replaces it never writes into: copies may share it."""

    @abstractmethod
    def __init__(self, features: Sequence[Any]) -> None: ...

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Takes one chunk in."""

    @abstractmethod
    def merged_with(self, others: Sequence[Self]) -> Self:
        """One of this one's requests and those of others after them."""

    @abstractmethod
    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[Any, Any]:
        """By feature what was collected, for requests of these lengths, with a place for each of `width` entries."""


def widened(columns: Sequence[Float[Tensor, "query_heads _"]], width: int) -> QueryHeadScores:
    """One column statistic of several requests, zero where a request has no entry."""
    longest = max(width, *(column.shape[-1] for column in columns))
    return torch.stack([F.pad(column, (0, longest - column.shape[-1])) for column in columns])
