"""`LayerGroup`: layers that share block tables. What they note while they attend, and how they execute a KeepSet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.features.moments import QueryMoments
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.keep_set import LayerKeepSet, LazyHostInts
from keepset.core.observation import Observation
from keepset.core.rope import RotaryTable
from keepset.errors import KeepsetError
from keepset.kernels.dispatch import upload
from keepset.paged.engine import Pages, QueryProjection
from keepset.paged.entry_columns import EntryColumns, columns_of
from keepset.paged.observer import Observer
from keepset.paged.page_tables import PageAssignment
from keepset.paged.paged_observation import AT_ONCE, PagedEntries, PagedObservation
from keepset.paged.passing import PassingQueries
from keepset.paged.planner import Planner
from keepset.paged.private_window_sums import OwnSums
from keepset.paged.step import EvictionEvent, QueryAddition, StepPlan, max_layers_per_event

logger = logging.getLogger(__name__)

CountEviction = Callable[..., None]
"""Is told by keyword of layers' compression: `events` (requests; 0 where the first layer is not among them),
`entries_kept`, `entries_dropped`, and `seconds`."""
_CPU_WORKSPACE = 1 << 22
"""Bytes of several layers' entries that an event looks at together on a CPU: launches cost little there, and what stays
in its caches is quicker."""


class LayerEntries(NamedTuple):
    """The entries of some layers at an event, layer after layer and row after row.

    Those up to its point are in the observation. Positions are None where each entry lies at its own.
    """

    places: range
    heads: Int[Tensor, "layers_rows kv_heads"]
    paged: PagedEntries
    positions: Int[Tensor, "layers_rows kv_heads entries"] | None
    observation: Observation


class LayerGroup:
    """The layers of a planner.

    What an entry is, apart from key and value, lies in columns of its own that are indexed by the same slots: its
    original position, and whatever the method remembers of it. So all of it moves, and is forgotten, together.

    Args:
        planner: of the group.
        pages: answers with a layer's cache, layer by layer.
        passing: what the layers hold of queries, with as many slots as the planner gives away.
        scaling: what the model multiplies query-key products with.
        rotary: of the model, where the recipe looks at queries before rotation.
        projections: of the layers, where the recipe looks at hidden states.
        count: is told of every compression; of several ranks, one's counts.
        saves: whether it is asked where entries come from once their requests have ended.
        tape: where layers that are called while a graph captures them leave their queries, for steps that replay it.

    Attributes:
        planner: as given.
        layers: indices of the group's layers in the model.
    """

    def __init__(
        self,
        planner: Planner,
        pages: Sequence[Callable[[], Pages]],
        passing: PassingQueries,
        scaling: float,
        rotary: RotaryTable | None = None,
        projections: Sequence[QueryProjection] = (),
        count: CountEviction | None = None,
        tape: Float[Tensor, "layers tokens query_heads head_dim"] | None = None,
        saves: bool = False,
    ) -> None:
        schedule = planner.schedule
        self.planner, self.layers, self.recipe = planner, planner.layers, schedule.recipe
        self._all_layers, self._block_size = schedule.layers, schedule.block_size
        self._pages, self._passing, self._count, self._tape = pages, passing, count, tape
        self._saves = saves
        needs = self.recipe.method.needs
        self._own = OwnSums(len(self.layers), schedule.kv_heads)
        self._observer = Observer(needs, planner.recording, passing, self._own, scaling, rotary, projections)
        self._has_covariances = bool(needs.of(QueryMoments) or needs.of(ModelStatistics))
        self._late: list[tuple[range, Tensor]] = []

    @cached_property
    def columns(self) -> EntryColumns:
        """Numbers of entries, once there is a cache."""
        pages, columns = self._pages[0](), columns_of(self.recipe, self.planner.recording.group, self._saves)
        return EntryColumns(columns, len(self.layers), pages.slots, self._block_size, pages.device)

    def record(self, places: range, plan: StepPlan, queries: Float[Tensor, "layers n query_heads head_dim"]) -> None:
        """Notes of a step's queries what events will look at, once these layers have attended.

        Args:
            places: the layers' in the group.
            plan: the step's.
            queries: of the step, after rotation; its entries are in the cache.
        """
        plan.recorded = True
        for place, own in zip(places, queries, strict=True):
            for chunk in plan.chunks:
                self._observer.collect(place, chunk, own, self._pages[place]())
        self._add_up(places, (*plan.added_first, *plan.added_now), queries)
        for place, own in zip(places, queries, strict=True):
            for held in plan.held:
                self._passing.hold(place, own, held)
        if plan.captured_before is not None:
            self._passing.record(places, queries[:, plan.captured_before.queries], plan.captured_before)
        if plan.captured_after is not None:
            self._late.append((places, queries[:, plan.captured_after.queries]))

    def record_replayed(self, plan: StepPlan) -> None:
        """The same of all layers after a step in which none was called, because a graph was replayed.

        Raises:
            RuntimeError: no graph has noted their queries.
        """
        if plan.records and not plan.recorded:
            if self._tape is None:
                raise RuntimeError("keepset lost the queries of a step, in which the engine called no layer.")
            self.record(range(len(self.layers)), plan, self._tape)

    def add_up(self, plan: StepPlan) -> None:
        """Adds up what waits long enough, once all layers have attended."""
        self._add_up(range(len(self.layers)), plan.added, None)

    def _add_up(
        self,
        places: range,
        additions: Sequence[QueryAddition],
        queries: Float[Tensor, "layers n query_heads head_dim"] | None,
    ) -> None:
        if additions:
            pages = [self._pages[place]() for place in places]
            for addition in additions:
                self._observer.add_up(places, addition, queries, pages, self.columns)

    def record_late(self, plan: StepPlan) -> None:
        """The same of queries that came after the step's events, which have been executed by now."""
        if plan.captured_after is not None:
            for places, queries in self._late:
                self._passing.record(places, queries, plan.captured_after)
            self._late = []

    def forget(self, event: EvictionEvent) -> None:
        """The event is over in all layers."""
        for record in event.records:
            self._own.forget(record.slot)

    def compress(self, event: EvictionEvent) -> None:
        """Executes an event in all layers."""
        method, budget, start = event.recipe.method, event.recipe.budget, time.perf_counter()
        for entries in self.read(event):
            kept = method.select(entries.observation, budget).layer(entries.observation.layer_ids[0])
            deal = self.deal(event, entries, kept)
            LazyHostInts.read([kept.heads, *deal.asked])
            if not event.is_counted(kept):
                # A request that starts again after a preemption has more to choose from than one that was compressed
                # all along, so a number that depends on it comes out differently. How many stay must not.
                assert event.keep is not None
                share = entries.observation.repeat_per_layer(upload(event.keep, kept.counts.device))[:, None]
                kept = method.choose(method.ranked(entries.observation, budget, share.expand_as(kept.counts)))
                deal = self.deal(event, entries, kept)
            self.execute(event, entries, kept, deal, start)
            start = time.perf_counter()

    def deal(self, event: EvictionEvent, entries: LayerEntries, kept: LayerKeepSet) -> PageAssignment:
        """Pages for what is to stay of these entries."""
        return event.pages.deal(entries.places, kept.counts + event.newer)

    def write_context(
        self,
        columns: Mapping[str, Tensor],
        layers: Int[Tensor, " n"],
        slots: Int[Tensor, " n"],
    ) -> None:
        """Writes entries that come from elsewhere into the pages, once all events that are due are over.

        Args:
            columns: `keys`, `values`, `positions` and what the method remembers, `[n, ...]`.
            layers: of each entry, counted within the group.
            slots: of each; they go on into the caches of the layers that follow.
        """
        pages = self._pages[0]()
        slots = (layers * pages.slots + slots) % (len(self.layers) * pages.slots)
        pages.write(columns["keys"], columns["values"], slots)
        self.columns.write_positions(slots, columns["positions"])
        for name in self.recipe.method.state_names:
            if name in self.columns and name in columns:
                self.columns.write(name, slots, columns[name])

    def export_request(self, blocks: Sequence[int], length: int) -> dict[int, dict[str, Tensor]]:
        """What a request of so many tokens has left in these blocks, once all events that are due are over.

        Args:
            blocks: the request's, by logical position.
            length: its tokens.

        Returns:
            Of every layer, by its index in the model, columns packed head after head, and the heads' `counts`.

        Raises:
            RuntimeError: where its entries lie is not known any more.
        """
        layers, pages = {}, self.planner.export_request(blocks, length)
        for place, layer in enumerate(self.layers):
            occupied = pages.occupied(range(place, place + 1))
            keys, values = self._pages[0]().read(occupied.subpages[0])
            lengths = occupied.entries.new_tensor([length])
            index = torch.arange(keys.shape[1], device=keys.device)
            exists = index < occupied.entries[0, :, None]
            positions = self.columns.positions(occupied, lengths)[0].int()
            columns = {"keys": keys[exists], "values": values[exists], "positions": positions[exists]}
            slots, packed = self.columns.slots(occupied.subpages), index < occupied.packed[0, :, None]
            for name in self.recipe.method.state_names:
                if name in self.columns:
                    columns[name] = self.columns.read(name, slots)[0].where(packed, 0)[exists]
            layers[layer] = {name: column.cpu() for name, column in columns.items()}
            layers[layer]["counts"] = occupied.entries[0].long().cpu()
        return layers

    def read(self, event: EvictionEvent) -> Iterator[LayerEntries]:
        """What the method may look at, up to the event's point: as many layers together as there is room for.

        Those are rows of a batch, where each may be any.
        """
        layers, entry_bytes, kv_heads = len(self.layers), self._pages[0]().entry_bytes, self.planner.schedule.kv_heads
        entries = event.pages.width * len(event.rows)
        together = max_layers_per_event(event.recipe, entries, kv_heads)
        if self._has_covariances:
            together = min(together, self._passing.layers_at_once(len(event.rows)))
        if event.at.device.type == "cpu":
            together = max(1, min(together, _CPU_WORKSPACE // (entries * kv_heads * entry_bytes)))
        for first in range(0, layers, together):
            yield self._read(event, range(first, min(first + together, layers)))

    def _read(self, event: EvictionEvent, places: range) -> LayerEntries:
        layers, columns = len(places), self.columns
        occupied = event.pages.occupied(places)
        subpages, packed, entries = occupied
        width = event.pages.width - event.newer if event.equal_heads else subpages.shape[-1] * self._block_size
        parts = self._observer.parts(event, places, occupied, columns, width)
        scales = [how for place in places if (how := self._pages[place]().eight_bits) is not None]
        paged = PagedEntries(self._pages[0](), subpages, scales)
        index = torch.arange(paged.shape[2], device=subpages.device)
        at, prompts, positions, state = event.at.repeat(layers), event.prompts.repeat(layers), None, {}
        if event.compressed:
            slots, moved = columns.slots(subpages)[..., :width], (index < packed[..., None])[..., :width]
            state = {name: columns.read(name, slots).where(moved, 0) for name in self.recipe.method.state_names}
            positions = columns.positions(occupied, at + event.newer)
        observation = PagedObservation(
            paged,
            width,
            positions=None if positions is None else positions[..., :width],
            valid=None if event.equal_heads else (index < (entries - event.newer)[..., None])[..., :width],
            lengths=at,
            prompts=prompts,
            layer_ids=self.layers[places.start : places.stop],
            layers=self._all_layers,
            state=state,
            longest=event.latest,
            **parts,
        )
        return LayerEntries(places, entries, paged, positions, observation)

    def execute(
        self, event: EvictionEvent, entries: LayerEntries, kept: LayerKeepSet, deal: PageAssignment, start: float
    ) -> None:
        """Packs what stays, and what came after the event; `start` is when the compression began."""
        pages, paged, newer = self._pages[0](), entries.paged, event.newer
        width, size, kv_heads = paged.shape[2], self._block_size, entries.heads.shape[1]
        index, rank = _survivors(kept, entries.heads, newer, width)
        heads = index // width
        place = index - heads * width
        seen = place < entries.heads.flatten()[heads] - newer
        values = None if kept.values is None else seen.cumsum(0) - 1
        sizes, held = (
            [entries_of_head + newer for entries_of_head in kept.heads.host_values],
            event.pages.held(entries.places),
        )
        if deal.fits is not None and not all(deal.fits.host_values):
            fits = deal.fits.device_values.bool().repeat_interleave(kv_heads)[heads]
            index, rank, heads, place, seen = (part[fits] for part in (index, rank, heads, place, seen))
            values = None if values is None else values[fits]
            sizes = [
                entries_of_head * deal.fits.host_values[head // kv_heads] for head, entries_of_head in enumerate(sizes)
            ]
            held = [entries_of_row * fit for entries_of_row, fit in zip(held, deal.fits.host_values, strict=True)]
        subpages = deal.take(max(sizes))
        page = heads * subpages.shape[-1] + rank // size
        slots = subpages.flatten().index_select(0, page) * size + rank % size
        del page, rank  # of long prompts these are long, too
        # Heads that differ may be dealt pages that others of their layer have left.
        for some, part in _blocks(sizes, 1 if event.equal_heads else kv_heads, pages.entry_bytes):
            moved_keys, moved_values = paged.take(some, index[part])
            if kept.values is not None and values is not None:
                fitted = kept.values[values[part].clamp(min=0)]
                moved_values = fitted.where(seen[part, None], moved_values)
            pages.write(moved_keys, moved_values, slots[part])
            del moved_keys, moved_values  # before the next ones are there
        positions = place if entries.positions is None else entries.positions.reshape(-1)[index]
        self.columns.write_positions(slots, positions)
        self._remember(kept, slots, heads, place, seen)
        if self._count is not None:
            seconds, stays, total = time.perf_counter() - start, sum(sizes), sum(held)
            events = len(event.rows) if self.layers[entries.places[0]] == self._all_layers[0] else 0
            self._count(events=events, entries_kept=stays, entries_dropped=total - stays, seconds=seconds)
            layers = len(entries.places)
            logger.debug("%d layers kept %d of %d entries in %.1f ms", layers, stays, total, 1e3 * seconds)

    def _remember(
        self,
        kept: LayerKeepSet,
        slots: Int[Tensor, " stays"],
        heads: Int[Tensor, " stays"],
        within: Int[Tensor, " stays"],
        seen: Bool[Tensor, " stays"],
    ) -> None:
        """Writes the method's own numbers that anybody asks for again; entries behind those that it saw have none."""
        for name, column in kept.state.items():
            if name not in self.columns:
                method = self.recipe.method
                if name in method.state_names:
                    continue
                raise KeepsetError(
                    f"{method.name} remembers {name!r} and does not say so: add it to its `state_names`."
                )
            width = column.shape[-1]
            remembered = column.reshape(-1, width)[heads, within.clamp(max=width - 1)]
            self.columns.write(name, slots, remembered.where(seen, 0))


def _survivors(
    kept: LayerKeepSet, entries: Int[Tensor, "rows kv_heads"], newer: int, width: int
) -> tuple[Int[Tensor, " stays"], Int[Tensor, " stays"]]:
    """Flat index of every entry that stays, `head * width + place`, head after head, and its rank in its head."""
    heads = kept.rows
    index, rank = heads * width + kept.indices, torch.arange(len(heads), device=heads.device) - kept.cu_seqlens[heads]
    if not newer:
        return index, rank
    counts, ends = kept.counts.flatten(), entries.flatten() - newer
    starts = kept.cu_seqlens[:-1] + newer * torch.arange(len(counts), device=heads.device)
    every = torch.arange(len(counts), device=heads.device).repeat_interleave(newer)
    nth = torch.arange(newer, device=heads.device).repeat(len(counts))
    stays = index.new_empty(len(index) + len(nth))
    stays[starts[heads] + rank] = index
    stays[starts[every] + counts[every] + nth] = every * width + ends[every] + nth
    return stays, torch.arange(len(stays), device=heads.device) - starts[stays // width]


def _blocks(sizes: Sequence[int], unit: int, entry_bytes: int) -> Iterator[tuple[range, slice]]:
    """Heads whose entries are moved together, and which of all that stay these are; so many are never parted."""
    starts, units = list(accumulate(sizes, initial=0)), len(sizes) // unit
    together = unit * max(1, units * AT_ONCE // max(starts[-1] * entry_bytes, 1))
    for first in range(0, len(sizes), together):
        some = range(first, min(first + together, len(sizes)))
        yield some, slice(starts[some.start], starts[some.stop])
