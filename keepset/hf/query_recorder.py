"""`Collector`: collects what a layer's next event looks at besides its entries.

Over the prompt `Accumulators` collect it, and between two events a `QueryRecorder`: it has sums and moments of queries,
so that these need not be stored. Those that must be stored are in a `QueryWindow`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepset.core.feature import Accumulators, Chunk, Feature, Needs, RequestKeys
from keepset.core.features.moments import QueryMoments
from keepset.core.features.queries import WindowAttention, WindowSums
from keepset.core.features.runtime_features import RecentQueries
from keepset.core.files import below
from keepset.hf.attention import AttentionInput
from keepset.hf.store import EntryStore
from keepset.kernels.columns import Moments
from keepset.kernels.window import add_received
from keepset.recording import RecordedFeatures, SummedFeature, moments_nbytes

_MOST = 8
"""The most queries that wait to be summed, which is the most that an event has to process."""
_SHARE = 20
"""The bytes of waiting queries are at most those of the entries divided by this."""
NEVER = sys.maxsize
"""The logical length of an event that does not come."""


class Collector:
    """The inputs of one layer's next event.

    The end of a prompt that is compressed is an event, whose inputs are collected in one forward or in chunks. Further
    events come at fixed intervals of tokens, given or generated. Attention sees the entries from before the newest
    event that a forward reaches. Padding between events counts as tokens, so a padded request has fewer queries in a
    window.

    Args:
        needs: the method's inputs besides the entries.
        prompt: tokens of a prompt that is compressed, padding included; None if there is none.
        every: tokens from one event to the next after the prompt; None if there are no such events.
        next_event: logical length of the first event after the prompt.
        turns: whether events come between turns, too, wherever `end_turn` says. Then the others count from the newest
            turn's prompt.

    Attributes:
        prompt: as given, until the prompt is complete.
        next: logical length of the next event after the prompt; every token so far lies before it. `NEVER` if none is
            known.
        span: how many tokens before that event are looked at, the last one included; `NEVER` for all tokens.
        turns: as given.
        recorder: records the queries before it; None if there is none.
    """

    def __init__(
        self,
        needs: Needs,
        prompt: int | None = None,
        every: int | None = None,
        next_event: int = 0,
        turns: bool = False,
    ) -> None:
        self.needs, self.prompt, self._every, self.turns = needs, prompt, every or 0, turns
        self.next, self.span = NEVER, 0
        self.recorder: QueryRecorder | None = None
        if turns:
            self.recorder = QueryRecorder(needs, every, turns=True)
            self.span = NEVER if self.recorder.reach else 1  # any token may be the turn's last
        elif every:
            self.next, self.recorder = next_event, QueryRecorder(needs, every)
            self.span = max(self.recorder.reach, 1)
        self._window, self._accumulators = QueryWindow(), Accumulators(() if prompt is None else needs)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for the events after the prompt, beside the store."""
        return 0 if self.recorder is None else self.recorder.nbytes

    @property
    def seconds(self) -> Mapping[Hashable, float]:
        """Time that each kind of feature took over the prompt."""
        return self._accumulators.seconds

    def looks_at(self, new: AttentionInput) -> bool:
        """Return whether an event will look at these tokens' queries, or lies among the tokens."""
        if self.prompt is not None or new.end > self.next - self.span:
            return True
        return self.recorder is not None and self.recorder.newest > 0 and new.padded

    def add(self, new: AttentionInput, store: EntryStore | None) -> tuple[AttentionInput | None, AttentionInput | None]:
        """Take in the tokens of one forward, once its attention is done. Entries beyond an event leave the store.

        Args:
            new: the tokens.
            store: the entries, including those of these tokens; None if these are the prompt's first.

        Returns:
            The tokens up to the newest event that they reach, and those beyond it. Older events are skipped.
        """
        if self.prompt is not None:
            self._add_of_prompt(new, store)
            self.record(new, None)
            return (new if new.end >= self.prompt else None), None
        if self.recorder is None:
            return None, None
        if new.end < self.next:
            self.record(new, store)
            return None, None
        assert store is not None
        point = new.end - (new.end - self.next) % self._every
        up_to_event, after = new.split(point)
        if after is not None:
            store.crop((after.lengths - up_to_event.lengths).tolist())
        if self.next < point:  # inputs that were collected for skipped events are not needed
            self.recorder.forget(store)
            self.next = point
        if self.turns:
            self.recorder.hold(up_to_event)
        else:
            self.recorder.record(up_to_event, store, point)
        self.recorder.add_up(up_to_event, store, point, point, up_to_event.lengths)
        return up_to_event, after

    def _add_of_prompt(self, new: AttentionInput, store: EntryStore | None) -> None:
        if size := self.needs.window:
            with self._accumulators.timed(RecentQueries):
                recent = new if new.real is not None else new.tokens(slice(max(new.length - size, 0), None))
                self._window.add(recent, size)
                self._window.keep(size)
        if not self._accumulators:
            return
        chunk = Chunk(
            queries=new.query,
            entries=partial(_entry_rows, new, store),
            positions=new.positions,
            valid=new.valid,
            softmax=new.softmax,
            lse=new.lse,
            source=new.layer_input,
            start=None if new.padded else new.start,
            host_positions=None if new.real is None else new.real.positions,
        )
        self._accumulators.add(chunk)

    def collected(self, up_to_event: AttentionInput, store: EntryStore | None) -> dict[str, Any]:
        """Return the inputs of an event, as arguments of an `Observation`, and begin the interval to the next one.

        Args:
            up_to_event: the newest tokens before the event.
            store: the entries; None if `up_to_event` has all of them. After the prompt keys and values are not among
                the inputs, because they are read in place.
        """
        if self.prompt is None:
            assert self.recorder is not None and store is not None
            state = store.other_columns
            parts: dict[str, Any] = {
                "positions": state.pop("positions"),
                "valid": store.exists,
                "count": store.entries,
                "state": state,
            }
            queries, features = self.recorder.take(up_to_event, state)  # takes its columns out of the state
            self.next += self._every if self.next < NEVER else 0
            return {**parts, **queries, "features": features}
        if store is None:
            parts = {"keys": up_to_event.key, "values": up_to_event.value}
        else:
            state, exists = store.padded()
            if not exists.shape[-1]:  # for prompts without tokens, so that no method gets empty tensors
                state = {
                    name: column.new_zeros(*column.shape[:2], 1, *column.shape[3:]) for name, column in state.items()
                }
                exists = exists.new_zeros(*exists.shape[:2], 1)
            parts = {name: state.pop(name) for name in ("keys", "values", "positions")}
            parts |= {"state": state, "valid": exists, "count": store.entries}
        features = self._accumulators.values(up_to_event.lengths, parts["keys"].shape[2])
        parts |= {**self._window.newest(self.needs.window), "features": features}
        self.prompt, self._window, seconds = None, QueryWindow(), self.seconds
        self._accumulators = Accumulators(())
        self._accumulators.seconds.update(seconds)
        return parts

    def end_turn(self, last: AttentionInput, store: EntryStore) -> None:
        """Sum the queries of a turn: an event can follow.

        Args:
            last: the turn's last token.
            store: the layer's entries.
        """
        assert self.recorder is not None
        self.recorder.add_up(last, store, last.end, last.end, last.lengths)

    def begin_turn(self, length: int, lengths: Int[Tensor, " batch"]) -> None:
        """Let a turn begin in a cache of entries that no query is known of.

        Args:
            length: the logical length.
            lengths: tokens of each request.
        """
        assert self.recorder is not None
        self.next = NEVER
        self.recorder.begin_turn(length, lengths)

    def expect_answer(self, prompt: int) -> None:
        """Say at which logical length a turn's prompt ends, from which its events count."""
        self.next = prompt + self._every if self._every else NEVER

    def record(self, new: AttentionInput, store: EntryStore | None) -> None:
        """Record queries for the next event after the prompt.

        Args:
            new: the tokens.
            store: the layer's entries; None while the prompt is not complete.
        """
        if self.recorder is not None and self.turns:
            self.recorder.hold(new)
        elif self.recorder is not None:
            self.recorder.record(new, store, self.next)

    def can_take_back(self, end: int) -> bool:
        """Return whether the newest queries can be forgotten, so that the logical length `end` is left."""
        return self.recorder is None or self.recorder.can_take_back(end, self.next)

    def crop(self, end: int, lengths: Int[Tensor, " batch"], store: EntryStore) -> None:
        """Forget the newest queries.

        Args:
            end: the logical length that is left.
            lengths: tokens of each request that are left.
            store: the layer's entries.
        """
        if self.recorder is not None:
            self.recorder.crop(end, lengths, store)

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Make the batch consist of these requests."""
        if self.recorder is not None:
            self.recorder.reorder(rows)

    def fork(self) -> Collector:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied.recorder = None if self.recorder is None else self.recorder.fork()
        copied._window, copied._accumulators = self._window.fork(), self._accumulators.fork()
        return copied


def _entry_rows(new: AttentionInput, store: EntryStore | None) -> RequestKeys:
    keys, counts = (new.key, new.counts) if store is None else (store.keys, store.counts[:: store.kv_heads])
    real_indices: Sequence[Tensor | slice] = new.real_indices or [slice(None)] * len(keys)
    return [(row[:, :count], real) for row, count, real in zip(keys, counts, real_indices, strict=True)]


class QueryRecorder:
    """Window sums and moments of the queries since an event, and the newest of these queries.

    The attention that an entry receives is added to a column of the store. A few queries are buffered and then summed
    together, because one product is faster than several, and because tokens can be taken back while their queries are
    in the buffer. In all methods `point` is the logical length at the next event, and `store` has the entries of the
    layer, or is None while the prompt is not complete.

    Args:
        needs: the method's inputs.
        every: tokens from event to event; None if there are only events between turns.
        turns: whether there are such events. All events then look at the queries of their own turn, which are held
            until the turn ends.

    Attributes:
        reach: how many of the newest queries before an event are needed.
        newest: how many of them the event reads themselves.
        window: queries that wait, or that the event needs themselves.
        moments: moments of the queries that do not wait any more.
        added_up_to: logical length up to which queries are summed, or at which the turn began.
    """

    def __init__(self, needs: Needs, every: int | None, turns: bool = False) -> None:
        features = self._features = RecordedFeatures.of(needs, every, turns)
        self.reach, self._summed, self._every, self._turns = features.reach(), features.summed(), every or 0, turns
        self.newest = features.newest
        self._windows = {feature: features.window(feature) for feature in features.added_up}
        self._rotated = bool(features.moments or features.reference)
        """Whether the rotation of queries is recorded with them, because a feature needs them unrotated."""
        self.window, self.moments, self.added_up_to = QueryWindow(), dict[QueryMoments, Moments](), 0
        self._lengths: Int[Tensor, " batch"] | None = None
        """Tokens of each request at `added_up_to`; None if all requests have that many."""
        self._few: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated beside the store."""
        lengths = 0 if self._lengths is None else self._lengths.nbytes
        return lengths + self.window.nbytes + sum(moments.nbytes for moments in self.moments.values())

    def record(self, forward: AttentionInput, store: EntryStore | None, point: int) -> None:
        """Record the queries of a forward that the next event needs.

        Args:
            forward: the tokens of a forward.
            store: the layer's entries; None while the prompt is not complete.
            point: logical length at the next event.
        """
        keeps_all = self.newest and forward.padded  # a request with padding may have its newest queries further back
        first = 0 if keeps_all else max(point - self.reach - forward.start, 0)
        if first >= forward.length:
            return
        new = forward.tokens(slice(first, None)) if first else forward
        begins = point - self._summed
        if begins < new.end:
            assert store is not None
            few, limit = self._limits(new, store)
            if new.length > limit:
                earlier, new = new.tokens(slice(0, new.length - few)), new.tokens(slice(new.length - few, None))
                self.window.add(earlier, earlier.length, self._rotated)
                self.add_up(earlier, store, point, earlier.end, earlier.lengths)
            elif new.end - max(self.added_up_to, begins) > limit:
                before = new.positions[:, 0] if new.valid is None else new.positions[:, 0] + ~new.valid[:, 0]
                self.add_up(forward, store, point, new.start, before)
        self.window.add(new, new.length, self._rotated)
        bound = max(self.newest, new.end - max(self.added_up_to, begins))
        if keeps_all and self.window.size > bound + _MOST:
            self.window.keep(bound)

    def hold(self, forward: AttentionInput) -> None:
        """Record the newest queries for a turn's end. Nobody knows whether it is near, so nothing is summed."""
        if self.reach:
            self.window.add(forward, self.reach, self._rotated)
            if self.window.size > self.reach + _MOST:
                self.window.keep(self.reach)

    def take(self, new: AttentionInput, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[Feature[Any], Any]]:
        """Return the inputs of an event, and begin the interval to the next one.

        Args:
            new: the newest tokens before the event.
            state: columns of the entries; window sums are taken out of it.

        Returns:
            The newest queries, as arguments of an Observation, and features.
        """
        features: dict[Feature[Any], Any] = {
            feature: WindowSums(state.pop(feature.column), self._windows[feature]) for feature in self._features.sums
        }
        for feature, moments in self.moments.items():
            assert new.layer_input is not None
            features[feature] = feature.distribution(moments, new.layer_input, new.lengths)
        reference = self._features.reference
        if reference is not None and (recorded := self.window.newest(reference.later)):
            assert new.layer_input is not None
            newest_queries, positions = recorded["queries"], recorded["query_positions"]
            source = new.layer_input.rotated_by(self.window.rotation(newest_queries.shape[2]))
            features[reference] = reference.of_newest(newest_queries, positions, source, new.lengths)
        newest, padded = self.newest, new.padded
        queries = self.window.newest(newest)
        self.moments, self._few = {}, None
        if not self._turns:
            self._lengths = self._lengths if padded else None
            self.window.keep(newest if padded else newest - self._every)
        return queries, features

    def forget(self, store: EntryStore) -> None:
        """Drop sums and moments."""
        self.moments = {}
        for feature in self._features.sums:
            store.forget(feature.column)

    def can_take_back(self, end: int, point: int) -> bool:
        """Return whether the newest queries can be forgotten; those in the sums only all together.

        Args:
            end: the logical length that would be left.
            point: logical length at the next event.
        """
        return self._turns or end >= self.added_up_to or end <= point - self._summed

    def crop(self, end: int, lengths: Int[Tensor, " batch"], store: EntryStore) -> None:
        """Forget the newest queries.

        Args:
            end: the logical length that is left.
            lengths: tokens of each request that are left.
            store: the layer's entries.
        """
        if self._turns:
            self.begin_turn(end, lengths)
            return
        if end < self.added_up_to:
            self.forget(store)
            self.added_up_to, self._lengths = end, lengths.clone()
        self.window.crop(lengths)

    def begin_turn(self, length: int, lengths: Int[Tensor, " batch"]) -> None:
        """Forget all queries, because a turn begins.

        Args:
            length: the logical length.
            lengths: tokens of each request.
        """
        self.window, self.added_up_to, self._lengths = QueryWindow(), length, lengths.clone()

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Make the batch consist of these requests."""
        self.window.reorder(rows)
        self.moments = {feature: moments.reordered(rows) for feature, moments in self.moments.items()}
        if self._lengths is not None:
            self._lengths = self._lengths[rows.to(self._lengths.device)]

    def fork(self) -> QueryRecorder:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied.window = self.window.fork()
        copied.moments = {feature: copy.copy(moments) for feature, moments in self.moments.items()}
        return copied

    # --- as tensors

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all that is held beside the store, by name."""
        tensors = {f"recorded.{name}": column for name, column in self.window.columns.items()}
        tensors |= {
            "holes": torch.tensor(self.window.holes, dtype=torch.bool),
            "added_up": torch.tensor(self.added_up_to, dtype=torch.long),
        }
        for number, feature in enumerate(self._features.moments):
            if feature in self.moments:
                parts = self.moments[feature].tensors
                tensors |= {f"moments.{number}.{name}": part for name, part in parts.items()}
        return tensors if self._lengths is None else {**tensors, "added": self._lengths}

    def restore(self, tensors: Mapping[str, Tensor], end: int, point: int) -> None:
        """Take over the `tensors` of another recorder, of a cache of the logical length `end`.

        Args:
            tensors: what `tensors` of another recorder has returned.
            end: the cache's logical length.
            point: logical length at the next event.
        """
        self.added_up_to, self._lengths = int(tensors.get("added_up", 0)), tensors.get("added")
        if recorded := below("recorded.", tensors):
            self.window = QueryWindow([recorded], bool(tensors["holes"]))
        for number, feature in enumerate(self._features.moments):
            if parts := below(f"moments.{number}.", tensors):
                self.moments[feature] = Moments.of(parts, feature.full)
        waiting = end - max(self.added_up_to, point - self._summed) if self._summed else 0
        if self.window.size < (min(waiting, 1) if self.window.holes else waiting):
            raise ValueError

    # ---

    def _limits(self, new: AttentionInput, store: EntryStore) -> tuple[int, int]:
        """Return how many queries may wait; and how many while there are no moments, which would take less memory."""
        if self._few is None:  # once per interval, because entries grow within it
            nbytes = self._query_nbytes(new)
            self._few = max(1, min(_MOST, store.entries * store.entry_bytes // (_SHARE * nbytes)))
        if not self._features.moments or self.moments:
            return self._few, self._few
        requests, heads, _, head_dim = new.query.shape
        return self._few, max(self._few, requests * moments_nbytes(heads, head_dim) // self._query_nbytes(new))

    @staticmethod
    def _query_nbytes(new: AttentionInput) -> int:
        """Return the bytes of a token's queries in all requests, as they are recorded."""
        return sum(part.nbytes for part in (new.query, new.positions, *(new.rotation or ()))) // new.length

    def add_up(
        self, new: AttentionInput, store: EntryStore, point: int, end: int, lengths: Int[Tensor, " batch"]
    ) -> None:
        """Sum all recorded queries, which end at the logical length `end` and at the requests' `lengths`.

        Args:
            new: tokens of the newest forward.
        """
        holes = self.window.holes
        for feature, window in self._windows.items():
            begins = max(self.added_up_to, point - window)
            if begins >= end:
                continue
            waiting = self.window.newest(self.window.size if holes else end - begins)
            queries, at, exists = waiting["queries"], waiting["query_positions"], None
            if holes:
                exists = self._not_yet_added(new, feature, point, at)
            if isinstance(feature, WindowAttention):
                last = feature.last_visible(at, _lengths_at(new, point, feature.window, at)) if feature.history else at
                last = last if exists is None else last.masked_fill(~exists, -1)
                column = store.column(feature.column, feature.sums_of.shape(queries.shape[1] // store.kv_heads))
                add_received(column, queries, store.attended, store.kv_heads, last, new.softmax, feature.sums_of)
            else:
                assert new.layer_input is not None
                source = new.layer_input.rotated_by(self.window.rotation(queries.shape[2]))
                chunk = Chunk(queries, list, at, exists, new.softmax, source=source)
                feature.add(self.moments.setdefault(feature, Moments()), chunk)
        if self._turns:  # the turn's end may look at the same queries
            return
        shifted = holes or new.padded
        # A copy, since a view would keep a whole forward's positions.
        self.added_up_to, self._lengths = end, lengths.clone() if shifted else None
        self.window.keep(self.newest if shifted else end - (point - self.newest))

    def _not_yet_added(
        self, new: AttentionInput, feature: SummedFeature, point: int, at: Int[Tensor, "batch n"]
    ) -> Bool[Tensor, "batch n"]:
        """Return which queries, at these positions, are in a feature's window and not summed yet.

        Args:
            new: the newest tokens.
            feature: of which the window is.
            point: logical length at the event.
            at: positions of the queries.
        """
        window = self._windows[feature]
        added = at.new_full((), self.added_up_to) if self._lengths is None else self._lengths
        return at >= (_lengths_at(new, point, window, at) - window).maximum(added)[:, None]


def _lengths_at(new: AttentionInput, point: int, window: int, at: Int[Tensor, "batch n"]) -> Int[Tensor, " batch"]:
    """Return each request's tokens at an event if the window before it has no padding.

    Args:
        new: the newest tokens.
        point: logical length at the event.
        window: tokens before the event that are looked at.
        at: positions of queries; says the batch and the device.
    """
    if new.cache_valid is None:
        return at.new_full((len(at),), point)
    return new.cache_valid[:, : max(point - window, 0)].sum(-1).to(at.device) + window


class QueryWindow:
    """Queries after rotation with their positions and, if it is recorded with them, their rotation.

    They are recorded in slices, which are joined when they are read. A slice is a copy: a view would keep a whole
    forward alive.

    Args:
        parts: columns `[batch, n, ...]` by name, right-aligned. A part never changes, so copies share it.
        holes: whether some of their queries may not exist (position -1).

    Attributes:
        size: the number of queries of each request, holes included.
    """

    def __init__(self, parts: Sequence[dict[str, Tensor]] = (), holes: bool = False) -> None:
        self._parts, self.holes = list(parts), holes
        self.size = sum(part["positions"].shape[1] for part in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(column.nbytes for part in self._parts for column in part.values())

    @property
    def columns(self) -> dict[str, Tensor]:
        """Return all that is recorded as one part; empty if nothing is."""
        if len(self._parts) > 1:
            joined = {name: torch.cat([part[name] for part in self._parts], 1) for name in self._parts[0]}
            self._parts = [_right_aligned(joined, joined["positions"].shape[1]) if self.holes else joined]
        return self._parts[0] if self._parts else {}

    def add(self, new: AttentionInput, size: int, rotated: bool = False) -> None:
        """Record the queries of each request's newest `size` of these tokens, with their rotation if that is asked.

        Args:
            new: tokens after attention.
            size: how many of each request's newest tokens.
            rotated: whether to record their rotation, too.
        """
        part = {"queries": new.query.transpose(1, 2), "positions": new.positions}
        if rotated and new.rotation is not None:
            cos, sin = new.rotation
            part |= {"cos": cos.expand(len(new.query), -1, -1), "sin": sin.expand(len(new.query), -1, -1)}
        if new.real is not None:
            part["positions"], self.holes = new.positions.masked_fill(~new.real.mask, -1), True
            self._parts.append(_right_aligned(part, size))
        else:
            self._parts.append({name: column[:, -size:].clone() for name, column in part.items()})
        self.size += self._parts[-1]["positions"].shape[1]

    def newest(self, size: int) -> dict[str, Tensor]:
        """Return the newest `size` queries, or as many as there are, as keyword arguments of an Observation."""
        if not size or not self._parts:
            return {}
        columns = self.columns
        return {
            "queries": columns["queries"][:, -size:].transpose(1, 2),
            "query_positions": columns["positions"][:, -size:],
        }

    def rotation(self, size: int) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines of the newest `size` queries, or None if they were not recorded."""
        columns = self.columns
        return (columns["cos"][:, -size:], columns["sin"][:, -size:]) if "cos" in columns else None

    def keep(self, size: int) -> None:
        """Forget all but the newest `size` queries of each request."""
        if size <= 0:
            self._parts, self.size = [], 0
        elif self.size > size:
            self.size, self._parts = size, [{name: column[:, -size:].clone() for name, column in self.columns.items()}]

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Make the batch consist of these requests."""
        if self._parts:
            self._parts = [{name: column[rows.to(column.device)] for name, column in self.columns.items()}]

    def crop(self, lengths: Int[Tensor, " batch"]) -> None:
        """Forget the queries that each request has beyond its length."""
        if columns := self.columns:
            gone = columns["positions"] >= lengths[:, None]
            cropped = {**columns, "positions": columns["positions"].masked_fill(gone, -1)}
            self._parts, self.holes = [_right_aligned(cropped, gone.shape[1])], True

    def fork(self) -> QueryWindow:
        """Return an independent copy."""
        return QueryWindow(self._parts, self.holes)


def _right_aligned(columns: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    exists = columns["positions"] >= 0
    order = exists.int().argsort(dim=-1, stable=True)[:, -size:]
    rows = torch.arange(len(order), device=order.device)[:, None]
    return {name: column[rows, order] for name, column in columns.items()}
