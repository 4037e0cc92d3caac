"""`ReferenceQueries`: some of the prompt's own queries, rotated to the first position after it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from keepset.core.accumulator import Accumulator, Chunk
from keepset.core.feature import Feature
from keepset.kernels.dispatch import upload


class PaddedQueries(NamedTuple):
    """Queries of each request after rotation, padded to one number, and which of them exist."""

    queries: Float[Tensor, "batch query_heads n head_dim"]
    exists: Bool[Tensor, "batch n"]

    @classmethod
    def padded(cls, rows: Sequence[Float[Tensor, "query_heads _ head_dim"]]) -> PaddedQueries:
        """Return the queries of requests that have different numbers of them."""
        lengths = upload([row.shape[1] for row in rows], rows[0].device)
        queries = pad_sequence([row.transpose(0, 1) for row in rows], batch_first=True).transpose(1, 2)
        return cls(queries, torch.arange(queries.shape[2], device=lengths.device) < lengths[:, None])

    def at_most(self, number: int) -> PaddedQueries:
        """Return the queries that there would be if at most `number` of each request had been asked for."""
        if self.queries.shape[2] <= number:
            return self
        rows = [row[:, own] for row, own in zip(self.queries, self.exists, strict=True)]
        return PaddedQueries.padded([row[:, :: _stride(row.shape[1], number)] for row in rows])


def _stride(rows: int, most: int) -> int:
    """Return the least power of two with which at most `most` of `rows` rows remain."""
    stride = 1
    while -(-rows // stride) > most:
        stride *= 2
    return stride


class _Row:
    """One request's queries before rotation, of every `stride`-th position; the stride doubles when they are too many.

    They are chosen by position, so that neither chunks nor padding change which are chosen.
    """

    def __init__(self, queries: Float[Tensor, "query_heads n head_dim"], stride: int) -> None:
        self.queries, self.stride = queries, stride

    def extended(self, new: Float[Tensor, "query_heads _ head_dim"], most: int) -> _Row:
        """Return the row with new queries, thinned to at most `most`."""
        queries = torch.cat([self.queries, new], 1)
        step = _stride(queries.shape[1], most)
        return _Row(queries[:, ::step].clone() if step > 1 else queries, self.stride * step)


class _Reference(Accumulator):
    def __init__(self, features: Sequence[ReferenceQueries]) -> None:
        self._most = max(feature.number for feature in features)
        self._rows: list[_Row] = []
        self._newest: Chunk

    def add(self, chunk: Chunk) -> None:
        assert chunk.source is not None
        self._newest, queries = chunk, chunk.source.undo(chunk.queries, chunk.positions)
        before = self._rows or [_Row(row[:, :0], 1) for row in queries]
        self._rows = []
        for i, row in enumerate(before):
            self._rows.append(row.extended(queries[i][:, chunk.every(row.stride, i)], self._most))

    def merged_with(self, others: Sequence[_Reference]) -> _Reference:
        copied = copy.copy(self)
        copied._rows = [row for part in (self, *others) for row in part._rows]
        return copied

    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[Feature[Any], Any]:
        assert self._newest.source is not None
        asked = PaddedQueries.padded([row.queries for row in self._rows])
        turned = self._newest.source.ahead(lengths, 1)(asked.queries)
        return {ReferenceQueries(self._most): asked._replace(queries=turned)}


@dataclass(frozen=True)
class ReferenceQueries(Feature[PaddedQueries]):
    """The prompt's own queries, or some of them at equal distances, as if they came once more right after it.

    At later events they do not exist.

    Attributes:
        number: how many at most. Queries of another number are the same feature.
    """

    label = "the prompt's queries once more"
    unrotated = True
    accumulator = _Reference

    number: int = field(compare=False)

    def merged(self, other: ReferenceQueries) -> ReferenceQueries:
        return max(self, other, key=lambda feature: feature.number)
