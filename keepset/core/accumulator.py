"""`Accumulator`: collects features over a prompt, chunk by chunk, under every runtime."""

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
from keepset.kernels.softmax import Softmax

Turn = Callable[[Tensor], Tensor]
"""Rotate rows `[batch, query_heads, n, head_dim]`, given before rotation."""

RequestKeys = Sequence[tuple[Float[Tensor, "kv_heads _ head_dim"], Tensor | slice]]
"""For each request the keys of its valid entries, and the indices of a chunk's queries that belong to it."""


class QuerySource(ABC):
    """A layer that makes queries of hidden states and rotates them."""

    @property
    @abstractmethod
    def hidden(self) -> HiddenStates:
        """The hidden states that entered the layer's attention with this chunk."""

    @abstractmethod
    def undo(self, queries: Queries, positions: Int[Tensor, "batch n"]) -> Queries:
        """Return this chunk's queries as they were before rotation, float32."""

    @abstractmethod
    def ahead(self, lengths: Int[Tensor, " batch"], future: int) -> Turn:
        """Return a function that rotates rows by the mean rotation of the positions after each request."""

    @abstractmethod
    def queries(self, hidden: HiddenStates, lengths: Int[Tensor, " batch"], future: int) -> Queries:
        """Return the queries that the layer makes of other hidden states, at the rotation of `ahead`."""

    def merged_with(self, others: Sequence[Self]) -> QuerySource:
        """Return the source for these requests and, after them, those of others; in one layer any source will do."""
        return self


@dataclass(frozen=True, eq=False)
class Chunk:
    """One step of one layer: `n` new tokens after those that came before.

    Attributes:
        queries: queries after rotation.
        entries: makes the entries so far, including this chunk's, for an accumulator that looks at them.
        positions, valid: position of each new token, and which of them are real; None if all are.
        softmax: how the model makes attention of query-key products.
        lse: log-sum-exp of every query's logits, if attention has computed it already.
        source: given if a feature needs queries before rotation or hidden states.
        start: position of the first token, if all requests have the same and the host knows it.
        host_positions: the tokens' positions on the host, negative for padding, if `start` is None and it knows them.
    """

    queries: Queries
    entries: Callable[[], RequestKeys]
    positions: Int[Tensor, "batch n"]
    valid: Bool[Tensor, "batch n"] | None
    softmax: Softmax
    lse: list[Tensor] | None = None
    source: QuerySource | None = None
    start: int | None = None
    host_positions: Int[Tensor, "batch n"] | None = None

    def every(self, stride: int, request: int) -> Tensor | slice:
        """Return which of a request's tokens have positions that are multiples of `stride`."""
        if self.start is not None:
            return slice(-self.start % stride, None, stride)
        if self.host_positions is None:
            return self.counted(0)[request] & (self.positions[request] % stride == 0)
        chosen = (self.host_positions[request] >= 0) & (self.host_positions[request] % stride == 0)
        return upload(chosen.nonzero()[:, 0], self.positions.device)

    def counted(self, skip: int) -> Bool[Tensor, "batch n"]:
        """Return which tokens exist and are not among the first `skip` of their request."""
        counted = self.positions >= skip
        return counted if self.valid is None else counted & self.valid


class Accumulator(ABC):
    """Collects all features of one kind, each once.

    `add` never writes into a tensor that it replaces, so copies may share tensors.
    """

    @abstractmethod
    def __init__(self, features: Sequence[Any]) -> None: ...

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Take in one chunk."""

    @abstractmethod
    def merged_with(self, others: Sequence[Self]) -> Self:
        """Return an accumulator of these requests and, after them, those of others."""

    @abstractmethod
    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[Any, Any]:
        """Return what was collected, by feature.

        Args:
            width: the least number of entries of the result.
        """


def widened(columns: Sequence[Float[Tensor, "query_heads _"]], width: int) -> QueryHeadScores:
    """Return one column statistic of several requests, zero where one has no entry; at least `width` entries wide."""
    longest = max(width, *(column.shape[-1] for column in columns))
    return torch.stack([F.pad(column, (0, longest - column.shape[-1])) for column in columns])
