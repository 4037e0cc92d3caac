"""Features that are made of a few queries: the prompt's own once more, and attention from the newest."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from keepset.core.feature import Accumulator, Chunk, Feature, QuerySource
from keepset.core.observation import Observation
from keepset.core.shapes import Queries
from keepset.kernels.dispatch import upload
from keepset.kernels.softmax import GroupReduction

Rows = Float[Tensor, "query_heads _ head_dim"]
"""Queries of one request."""


class PaddedQueries(NamedTuple):
    """Queries of each request after rotation, padded to one number, and which of them exist."""

    queries: Float[Tensor, "batch query_heads n head_dim"]
    exists: Bool[Tensor, "batch n"]

    @classmethod
    def padded(cls, rows: Sequence[Rows]) -> PaddedQueries:
        """Return the queries of requests that have different numbers of them."""
        lengths = upload([row.shape[1] for row in rows], rows[0].device)
        queries = pad_sequence([row.transpose(0, 1) for row in rows], batch_first=True).transpose(1, 2)
        return cls(queries, torch.arange(queries.shape[2], device=lengths.device) < lengths[:, None])

    @property
    def rows(self) -> list[Rows]:
        """Return each request's queries, without padding."""
        return [row[:, row_exists] for row, row_exists in zip(self.queries, self.exists, strict=True)]


class Reference(NamedTuple):
    """Queries of each request's prompt, rotated as if they came right after it: some evenly spaced, and the newest."""

    spread: PaddedQueries
    newest: PaddedQueries

    def at_most(self, spread: int, newest: int) -> PaddedQueries:
        """Return the queries of a request for at most so many of each kind.

        Args:
            spread: the most evenly spaced queries.
            newest: the most newest queries.
        """
        spread_queries, last = self
        if spread_queries.queries.shape[2] > spread:
            spread_queries = PaddedQueries.padded(
                [row[:, :: _stride(row.shape[1], spread)] for row in spread_queries.rows]
            )
        if last.queries.shape[2] > newest:
            last = PaddedQueries.padded([_last(row, newest) for row in last.rows])
        return PaddedQueries(
            torch.cat([spread_queries.queries, last.queries], 2), torch.cat([spread_queries.exists, last.exists], 1)
        )


def _stride(rows: int, most: int) -> int:
    """Return the least power of two with which at most `most` of `rows` rows remain.

    Args:
        rows: how many there are.
        most: how many may remain.
    """
    stride = 1
    while -(-rows // stride) > most:
        stride *= 2
    return stride


def _last(rows: Rows, most: int) -> Rows:
    return rows[:, max(rows.shape[1] - most, 0) :]


class _Row:
    """One request's queries before rotation: of every `stride`-th position, and the newest; and how many have come.

    Spaced queries are chosen by position, so neither chunks nor padding change the choice. The stride doubles when
    there are too many of them.
    """

    def __init__(self, spread: Rows, newest: Rows, stride: int, tokens: int) -> None:
        self.spread, self.newest, self.stride, self.tokens = spread, newest, stride, tokens

    def extended(self, new: Rows, most: int, most_newest: int) -> _Row:
        """Return the row with the request's next queries.

        Args:
            new: queries before rotation, `[query_heads, n, head_dim]`.
            most: the most spaced queries that remain.
            most_newest: the most newest queries that remain.
        """
        candidates = torch.cat([self.spread, new[:, -self.tokens % self.stride :: self.stride]], 1)
        step = _stride(candidates.shape[1], most)
        last = _last(torch.cat([self.newest, _last(new, most_newest)], 1), most_newest)
        spread = candidates[:, ::step].clone() if step > 1 else candidates
        return _Row(spread, last.clone(), self.stride * step, self.tokens + new.shape[1])


class _Reference(Accumulator):
    def __init__(self, features: Sequence[ReferenceQueries]) -> None:
        (self._feature,) = features  # equal ones are merged
        self._rows: list[_Row] = []
        self._latest: Chunk

    def add(self, chunk: Chunk) -> None:
        assert chunk.source is not None
        self._latest, queries = chunk, chunk.source.undo(chunk.queries, chunk.positions)
        before = self._rows or [_Row(row[:, :0], row[:, :0], 1, chunk.start or 0) for row in queries]
        self._rows = [
            row.extended(new[:, chunk.every(1, i)], self._feature.spread, self._feature.newest)
            for i, (row, new) in enumerate(zip(before, queries, strict=True))
        ]

    def merged_with(self, following: Sequence[_Reference]) -> _Reference:
        copied = copy.copy(self)
        copied._rows = [row for part in (self, *following) for row in part._rows]
        return copied

    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[Feature[Any], Any]:
        assert self._latest.source is not None
        turn = self._latest.source.ahead(lengths, 1)
        spread = PaddedQueries.padded([row.spread for row in self._rows])
        newest = PaddedQueries.padded([row.newest for row in self._rows])
        return {self._feature: Reference(*(part._replace(queries=turn(part.queries)) for part in (spread, newest)))}


@dataclass(frozen=True)
class ReferenceQueries(Feature[Reference]):
    """Some of a text's own queries, as if they came once more right after it.

    Attributes:
        spread: the most evenly spaced queries of a prompt, at its end. Features that differ only in numbers are merged.
        newest: the most newest queries of a prompt, at its end. A query may be among both.
        later: how many of the newest queries there are at events after the prompt, at which none are evenly spaced; 0
            for none at all.
    """

    name = "the prompt's queries once more"
    unrotated = True
    accumulator = _Reference

    spread: int = field(compare=False)
    newest: int = field(compare=False)
    later: int = field(default=0, compare=False)

    def merged(self, other: ReferenceQueries) -> ReferenceQueries:
        numbers = zip(astuple(self), astuple(other), strict=True)
        return ReferenceQueries(*map(max, numbers))

    def of_newest(
        self, queries: Queries, positions: Int[Tensor, "batch n"], source: QuerySource, lengths: Int[Tensor, " batch"]
    ) -> Reference:
        """Return the value at an event after the prompt.

        Args:
            queries: the newest queries, after rotation.
            positions: their positions; negative for queries that do not exist.
            source: the layer, which knows their rotation.
            lengths: tokens of each request.
        """
        once_more = source.ahead(lengths, 1)(source.undo(queries, positions))
        newest = PaddedQueries(once_more, positions >= 0)
        return Reference(PaddedQueries(once_more[:, :, :0], newest.exists[:, :0]), newest)


@dataclass(frozen=True, eq=False)
class WindowSums:
    """Attention that entries received from a window of queries.

    Attributes:
        attention_sums: summed over the window's queries, float32; per query head if the feature says so.
        window: how many queries; queries that a shorter request lacks count as zero.
    """

    attention_sums: Float[Tensor, "batch kv_heads entries *group"]
    window: int


@dataclass(frozen=True)
class WindowAttention(Feature[WindowSums]):
    """Causal attention of the newest `window` queries, summed over them, for each entry and KV head.

    At the prompt's end it is computed from these queries. After the prompt it is summed per entry while the queries
    come, so that hardly a query is stored. A window reaches no further back than the event before. If events are at
    least `window` tokens apart, nothing is dropped during the window, and the sums equal those that the queries would
    give at the event. If events come more often (`every=I`), the window is the newest I queries.

    Attributes:
        window: how many queries.
        history: whether only attention to entries before the newest `window` tokens counts, by a softmax over these.
        sums_of: how to reduce the query heads that share a KV head.
    """

    summed = True

    window: int = field()
    history: bool = False
    sums_of: GroupReduction = GroupReduction.MEAN

    @property
    def name(self) -> str:
        return f"window of {self.window} queries"

    @cached_property
    def column(self) -> str:
        """The name of the column that holds the sums; no method's own column has such a name."""
        rule = {
            GroupReduction.MEAN: "",
            GroupReduction.EACH: ", by each head",
            GroupReduction.LARGEST: ", by the largest",
        }
        return f"received of {self.window}{', before it' * self.history}{rule[self.sums_of]}"

    def of(self, observation: Observation) -> WindowSums:
        return self.made(observation, self.window)

    def made(self, observation: Observation, window: int) -> WindowSums:
        """Return the sums over the newest `window` queries of an observation.

        Args:
            observation: with the newest queries.
            window: how many of them to sum over.
        """
        queries, at = observation.newest_queries(window)
        last_visible = self.last_visible(at, observation.lengths)
        return WindowSums(self.sums_of.of(observation.attention_sums(queries, last_visible, self.sums_of)), window)

    def last_visible(self, at: Int[Tensor, "batch n"], lengths: Int[Tensor, " batch"]) -> Int[Tensor, "batch n"]:
        """Return the last position that each query sees at an event where requests have so many tokens.

        Args:
            at: positions of queries; below 0 for queries that do not exist.
            lengths: tokens of each request at the event.
        """
        return at.minimum(lengths[:, None] - (self.window + 1)) if self.history else at
