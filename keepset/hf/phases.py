"""The phases of a layer, its prompt and its decoding: each collects what a method looks at until an event is due."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from keepset.core.accumulator import Chunk, RequestKeys
from keepset.core.accumulators import Accumulators
from keepset.core.feature import Feature, Needs
from keepset.core.features.runtime_features import RecentQueries
from keepset.hf.forward import Forward
from keepset.hf.passing import PassingQueries
from keepset.hf.store import EntryStore
from keepset.hf.window import QueryWindow


@dataclass(frozen=True, eq=False)
class LayerEvent:
    """An event that one layer has reached: all its entries, of which nothing is dropped yet.

    Attributes:
        length: logical length of the event.
        observed: entries and newest queries, as an Observation's keyword arguments.
        features: what was collected of the others.
        held: entries of each head of each request.
        beyond: the tokens of the same forward that follow the event, which nobody looks at.
        store: that holds keys and values, where these are not among what is observed.
        seconds: that each kind of feature took to collect.
    """

    length: int
    observed: dict[str, Any]
    features: dict[Feature[Any], Any]
    held: Sequence[list[int]]
    beyond: Forward | None = None
    seconds: Mapping[Hashable, float] = field(default_factory=dict)
    store: EntryStore | None = None

    @property
    def keys(self) -> Tensor:
        """In some order."""
        return self.observed["keys"] if self.store is None else self.store.heads.keys


class PromptPhase:
    """The prompt, in one forward or in chunks: its end is the event.

    Attributes:
        needs: what the method looks at beside the entries.
    """

    def __init__(self, needs: Needs, length: int) -> None:
        self.needs, self._length = needs, length
        self._window, self._accumulators = QueryWindow(), Accumulators(needs)

    def looks_at(self, forward: Forward) -> bool:
        """Whether it looks at a forward's queries, or at its end."""
        return True

    def take(self, forward: Forward, store: EntryStore | None) -> LayerEvent | None:
        """One chunk, once its attention is done; the event if it is the last. No store: the forward is all there is."""
        if not self.needs and forward.end < self._length:
            return None
        observed = _entries(forward, store)
        if size := self.needs.window:
            with self._accumulators.timed(RecentQueries):
                self._window.add(forward.query, forward.positions, forward.valid, size)
                self._window.keep(size)
        entries = partial(_rows, observed["keys"], forward, store)
        lse, source = forward.lse, forward.layer_input
        start, here = (
            None if forward.padded else forward.start,
            None if forward.real is None else forward.real.positions,
        )
        chunk = Chunk(
            forward.query, entries, forward.positions, forward.valid, forward.call.scaling, lse, source, start, here
        )
        self._accumulators.add(chunk)
        if forward.end < self._length:
            return None
        features = self._accumulators.values(forward.lengths, observed["keys"].shape[2])
        observed |= self._window.newest(size)
        held = _held(forward, store)
        return LayerEvent(self._length, observed, features, held, seconds=self._accumulators.seconds)

    def fork(self) -> PromptPhase:
        """An independent copy."""
        copied = copy.copy(self)
        copied._window, copied._accumulators = self._window.fork(), self._accumulators.fork()
        return copied


class DecodingPhase:
    """What follows the prompt, with an event after every so many tokens, whoever said them.

    Attention sees what there was before the newest event that a forward reaches; tokens beyond it are left out. What is
    looked at of the queries is in `passing`. Where padding comes between events it counts as a step: of a request that
    has some, fewer queries are in a window.

    Attributes:
        next: the next event's length; every token so far lies before it.
        passing: what the queries before it leave behind.
    """

    def __init__(self, needs: Needs, every: int, next_event: int) -> None:
        self._newest, self._every = needs.newest, every
        self.next, self.passing = next_event, PassingQueries(needs, every)

    def looks_at(self, forward: Forward) -> bool:
        """Whether it looks at a forward's queries, or at its end."""
        return forward.end > self.next - max(self.passing.reach, 1) or (forward.padded and self._newest > 0)

    def take(self, forward: Forward, store: EntryStore) -> LayerEvent | None:
        """One forward, once its attention is done; the newest event that it reaches, older ones are passed over.

        Entries beyond the event are taken out of the store.
        """
        if forward.end < self.next:
            self.record(forward, store)
            return None
        point = forward.end - (forward.end - self.next) % self._every
        until, beyond = forward.split(point)
        if beyond is not None:
            store.crop((beyond.lengths - until.lengths).tolist())
        if self.next < point:  # what there was for those that are passed over
            self.passing.forget(store)
            self.next = point
        self.record(until, store)
        self.passing.add_up(until, store, point)
        state = store.others
        observed = {**_common(until), "positions": state.pop("positions"), "state": state}
        observed |= {"valid": store.exists, "count": store.entries, **self.passing.window.newest(self._newest)}
        features = self.passing.values(until, state)
        self.passing.begin(forward.padded)
        self.next += self._every
        return LayerEvent(point, observed, features, _held(until, store), beyond, store=store)

    def record(self, forward: Forward, store: EntryStore | None) -> None:
        """Takes in those of a forward's queries that the next event looks at; the store, once the prompt is there."""
        self.passing.record(forward, store, self.next)

    def fork(self) -> DecodingPhase:
        """An independent copy."""
        copied = copy.copy(self)
        copied.passing = self.passing.fork()
        return copied


def _entries(forward: Forward, store: EntryStore | None) -> dict[str, Any]:
    """A layer's entries as an Observation's keyword arguments; where there is no more than a forward, views of it."""
    observed = _common(forward)
    if store is None and forward.valid is None:
        return {**observed, "keys": forward.key, "values": forward.value}
    store = store or forward.pack()
    state, exists = store.padded()
    if not exists.shape[-1]:  # of prompts without a token: no method meets a tensor of no entries
        state = {name: column.new_zeros(*column.shape[:2], 1, *column.shape[3:]) for name, column in state.items()}
        exists = exists.new_zeros(*exists.shape[:2], 1)
    columns = {name: state.pop(name) for name in ("keys", "values", "positions")}
    return {**observed, **columns, "state": state, "valid": exists, "count": store.entries}


def _common(forward: Forward) -> dict[str, Any]:
    return {"lengths": forward.lengths, "scaling": forward.call.scaling}


def _held(forward: Forward, store: EntryStore | None) -> list[list[int]]:
    """Entries of each head of each request; of a store that is not there, those of the forward."""
    if store is None:
        return [[count] * forward.key.shape[1] for count in forward.counts]
    counts, heads = store.counts, store.kv_heads
    return [counts[first : first + heads] for first in range(0, len(counts), heads)]


def _rows(keys: Tensor, forward: Forward, store: EntryStore | None) -> RequestKeys:
    """For every request its keys without holes, and which of the chunk's queries are real."""
    counts = forward.counts if store is None else store.counts[:: store.kv_heads]
    own = [slice(None)] * len(keys) if forward.real is None else forward.real.indices
    return [(row[:, :count], real) for row, count, real in zip(keys, counts, own, strict=True)]
