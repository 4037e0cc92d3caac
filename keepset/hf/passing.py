"""`PassingQueries`: what the queries that pass before an event leave behind, so that they need not be kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepset.core.accumulator import Chunk
from keepset.core.feature import Feature, Needs
from keepset.core.features.moments import QueryMoments
from keepset.core.features.window import WindowAttention, WindowSums
from keepset.hf.attention import AttentionInput
from keepset.hf.store import EntryStore
from keepset.hf.window import QueryWindow
from keepset.kernels.moments import Moments
from keepset.kernels.window import add_received

_MOST = 8
"""Queries that wait to be added up, at most: an event has no more than these to look at."""
_SHARE = 20
"""They weigh at most one part in so many of the entries."""


class PassingQueries:
    """Sums and moments over the queries that have passed since an event, and the newest of these queries themselves.

    What an entry receives is added to a column of the store. A query is not added up at once: a few wait, so that
    there is one product for several of them, and so that their tokens can be taken back. Moments begin once they weigh
    less than the queries that they are made of.

    Attributes:
        window: queries that wait, or that the event looks at itself.
        moments: of those that do not wait any more.
        until: the logical length up to which queries are added up.
    """

    def __init__(self, needs: Needs, every: int) -> None:
        self._newest, self._every = needs.newest, every
        self._sums = needs.of(WindowAttention)
        self._moments = [feature for feature in needs.of(QueryMoments) if feature.buffer]
        self.window, self.moments, self.until = QueryWindow(), dict[QueryMoments, Moments](), 0
        self._lengths: Int[Tensor, " batch"] | None = None
        """Of the requests at `until`, where that is not as many tokens of each."""
        self._few: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated beside the store."""
        lengths = 0 if self._lengths is None else self._lengths.nbytes
        return lengths + self.window.nbytes + sum(moments.nbytes for moments in self.moments.values())

    @property
    def reach(self) -> int:
        """How many of the newest queries before an event are looked at."""
        return max([self._newest, *(self._reach(feature) for feature in self._added)], default=0)

    def record(self, forward: AttentionInput, store: EntryStore | None, point: int) -> None:
        """Takes in those of a forward's queries that are looked at at the next point, which lies behind them."""
        everything = forward.padded and self._newest
        first = 0 if everything else max(point - self.reach - forward.start, 0)
        if first >= forward.length:
            return
        new = forward.tokens(slice(first, None)) if first else forward
        begins = min((point - self._reach(feature) for feature in self._added), default=point)
        if begins < new.end:
            assert store is not None
            few, limit = self._limits(new, store)
            if new.length > limit:
                cut = new.length - few
                earlier, new = new.tokens(slice(0, cut)), new.tokens(slice(cut, None))
                self._add(earlier)
                self.add_up(earlier, store, point)
            elif new.end - max(self.until, begins) > limit:
                before = new.positions[:, 0] if new.valid is None else new.positions[:, 0] + ~new.valid[:, 0]
                self._add_up(forward, store, new.start, before, point)
        self._add(new)
        bound = max(self._newest, new.end - max(self.until, begins))
        if everything and self.window.size > bound + _MOST:
            self.window.keep(bound)

    def add_up(self, forward: AttentionInput, store: EntryStore, point: int) -> None:
        """Adds up all queries so far, the newest of which are this forward's."""
        self._add_up(forward, store, forward.end, forward.lengths, point)

    def values(self, forward: AttentionInput, state: dict[str, Tensor]) -> dict[Feature[Any], Any]:
        """What there is for an event at the forward's end; columns that are not a method's own leave its state."""
        values: dict[Feature[Any], Any] = {}
        for feature in self._sums:
            received = state.pop(feature.column)
            values[feature] = WindowSums(received, self._reach(feature))
        source = forward.layer_input
        for of, moments in self.moments.items():
            assert source is not None
            values[of] = of.distribution(moments, source, forward.lengths)
        return values

    def forget(self, store: EntryStore) -> None:
        """Drops sums and moments."""
        self.moments = {}
        for feature in self._sums:
            store.forget(feature.column)

    def begin(self, padded: bool) -> None:
        """The next interval begins."""
        self.moments, self._few = {}, None
        self._lengths = self._lengths if padded else None
        self.window.keep(self._newest if padded else self._newest - self._every)

    def taken_back(self, end: int, point: int) -> bool:
        """Whether queries from this logical length on can be forgotten; those that were added up, only all together."""
        if end >= self.until:
            return True
        begins = [point - self._reach(feature) for feature in self._added]
        return not any(begin < end < self.until for begin in begins)

    def crop(self, end: int, lengths: Int[Tensor, " batch"], store: EntryStore) -> None:
        """Forgets queries from this logical length on, where each request has so many tokens then."""
        if end < self.until:
            self.forget(store)
            self.until, self._lengths = end, lengths.clone()
        self.window.crop(lengths)

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Makes the batch consist of these requests."""
        self.window.reorder(rows)
        self.moments = {feature: moments.reordered(rows) for feature, moments in self.moments.items()}
        if self._lengths is not None:
            self._lengths = self._lengths[rows.to(self._lengths.device)]

    def fork(self) -> PassingQueries:
        """An independent copy."""
        copied = copy.copy(self)
        copied.window = self.window.fork()
        copied.moments = {feature: copy.copy(moments) for feature, moments in self.moments.items()}
        return copied

    # --- as tensors

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that there is beside the store and `until`."""
        tensors = {f"recorded.{name}": column for name, column in self.window.columns.items()}
        tensors["holes"] = torch.tensor(self.window.holes)
        for number, feature in enumerate(self._moments):
            if feature in self.moments:
                parts = self.moments[feature].tensors
                tensors |= {f"moments.{number}.{name}": part for name, part in parts.items()}
        return tensors if self._lengths is None else {**tensors, "added": self._lengths}

    def restore(self, tensors: Mapping[str, Tensor], end: int, point: int) -> None:
        """Take over the `tensors` of another one.

        Args:
            tensors: that the other one had.
            end: tokens that there were.
            point: the next event's length.

        Raises:
            ValueError: queries are missing that the next event looks at.
        """

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}

        self._lengths = tensors.get("added")
        if recorded := part("recorded."):
            self.window = QueryWindow([recorded], bool(tensors["holes"]))
        for number, feature in enumerate(self._moments):
            if parts := part(f"moments.{number}."):
                self.moments[feature] = Moments.of(parts, feature.full)
        begins = min((point - self._reach(feature) for feature in self._added), default=end)
        waiting = end - max(self.until, begins)
        if self.window.size < (min(waiting, 1) if self.window.holes else waiting):
            raise ValueError

    # ---

    @property
    def _added(self) -> Iterator[WindowAttention | QueryMoments]:
        yield from self._sums
        yield from self._moments

    def _reach(self, feature: WindowAttention | QueryMoments) -> int:
        return min(feature.window or feature.buffer, self._every)

    def _limits(self, forward: AttentionInput, store: EntryStore) -> tuple[int, int]:
        """How many queries may wait to be added up; and before there are moments as many as weigh what these would."""
        if self._few is None:  # of the interval; its entries grow
            self._few = max(1, min(_MOST, store.entries * store.entry_bytes // (_SHARE * _nbytes(forward))))
        if not self._moments or self.moments:
            return self._few, self._few
        requests, heads, _, size = forward.query.shape
        return self._few, max(self._few, 4 * requests * heads * (size * (size + 1) // 2 + size) // _nbytes(forward))

    def _add(self, new: AttentionInput) -> None:
        self.window.add(new.query, new.positions, new.valid, new.length, new.rotation if self._moments else None)

    def _add_up(self, forward: AttentionInput, store: EntryStore, end: int, lengths: Tensor, point: int) -> None:
        shifted = self.window.holes or forward.padded
        for feature in self._added:
            begin = max(self.until, point - self._reach(feature))
            if begin >= end:
                continue
            waiting = self.window.newest(end - begin if not self.window.holes else self.window.size)
            queries, at, exists = waiting["queries"], waiting["query_positions"], None
            if self.window.holes:
                oldest = (lengths + (point - end - self._reach(feature))).clamp(min=0)
                exists = at >= oldest[:, None].maximum(self._added_up_to(at))
            if isinstance(feature, WindowAttention):
                last = feature.last_visible(at, lengths + (point - end)) if feature.history else at
                last = last if exists is None else last.masked_fill(~exists, -1)
                column = store.column(feature.column, feature.sums_of.shape(queries.shape[1] // store.kv_heads))
                scaling = forward.scaling
                add_received(column, queries, store.heads, store.kv_heads, last, scaling, feature.sums_of)
            else:
                self._add_moments(feature, forward, queries, at, exists)
        # A copy, since a view would keep a whole forward's positions.
        self.until, self._lengths = end, lengths.clone() if shifted else None
        self.window.keep(self._newest if shifted else end - (point - self._newest))

    def _added_up_to(self, at: Tensor) -> Tensor:
        """The first position of each request that is not added up."""
        return at.new_full((), self.until) if self._lengths is None else self._lengths[:, None]

    def _add_moments(
        self,
        feature: QueryMoments,
        forward: AttentionInput,
        queries: Tensor,
        at: Tensor,
        exists: Bool[Tensor, "batch n"] | None,
    ) -> None:
        assert forward.layer_input is not None
        source = forward.layer_input.rotated_by(self.window.rotation(queries.shape[2]))
        chunk = Chunk(queries, list, at, exists, forward.scaling, source=source)
        rows, counted = feature.rows(chunk, source), chunk.counted(feature.skip)
        self.moments.setdefault(feature, Moments()).add(rows, counted, feature.full)


def _nbytes(forward: AttentionInput) -> int:
    """Of what is recorded of one token."""
    parts = (forward.query, forward.positions, *(forward.rotation or ()))
    return sum(part.nbytes for part in parts) // forward.length
