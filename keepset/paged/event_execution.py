"""`EventQueue`: executes the compressions that are due after a step before the next one, in all layers at once.

An event reads what the recipe needs, lets it choose what stays, and packs that into pages. Between two steps nothing
writes to pages: if a request has ended and its pages belong to another one, that one writes to them only in a later
step. So an event can be executed even if its request is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepset.core.features.moments import QueryMoments
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.keep_set import LayerKeepSet, LazyHostInts
from keepset.core.observation import Observation
from keepset.errors import KeepsetError
from keepset.kernels.dispatch import upload
from keepset.kernels.packed import BIAS
from keepset.paged.eviction import EvictionEvent, PageAssignment, max_layers_per_event
from keepset.paged.layer_group import LayerGroup
from keepset.paged.layout_table import EmptiedBlocks
from keepset.paged.pages import WORKSPACE, PagedEntries, PagedObservation
from keepset.paged.step import StepBatch, StepPlan

logger = logging.getLogger(__name__)

_CPU_WORKSPACE = 1 << 22
"""Bytes of several layers' entries that an event reads together on a CPU: launches cost little there, and entries that
fit its caches are read faster."""


class EventEntries(NamedTuple):
    """The entries of some layers at an event, layer after layer and row after row.

    Attributes:
        places: the layers, by their places in the group.
        heads: entries of each head.
        paged: the entries in their pages.
        positions: the position of each entry; None where entry `i` is at position `i`.
        observation: the entries up to the event's point.
    """

    places: range
    heads: Int[Tensor, "layers_rows kv_heads"]
    paged: PagedEntries
    positions: Int[Tensor, "layers_rows kv_heads entries"] | None
    observation: Observation


def compress(group: LayerGroup, event: EvictionEvent) -> None:
    """Execute an event in all layers of a group, as many layers together as there is room for.

    Args:
        group: the layers.
        event: the event, whose step was computed.
    """
    method, start = event.recipe.method, time.perf_counter()
    for entries in read_event(group, event):
        budget = event.recipe.budget_for([entries.observation])
        kept = method.select(entries.observation, budget).layer(entries.observation.layer_ids[0])
        assignment = _assign(event, entries, kept)
        LazyHostInts.read([kept.heads, *assignment.host_reads])
        if not event.is_counted(kept):
            # A request that starts again after a preemption has more to choose from than one that was compressed
            # all along. How many entries stay must not depend on that.
            assert event.keep is not None
            share = entries.observation.repeat_per_layer(upload(event.keep, kept.counts.device))[:, None]
            kept = method.choose(method.ranked(entries.observation, budget, share.expand_as(kept.counts)))
            assignment = _assign(event, entries, kept)
        execute(group, event, entries, kept, assignment, start)
        start = time.perf_counter()


def compress_across(due: Sequence[tuple[LayerGroup, EvictionEvent]]) -> None:
    """Execute one event of a recipe that looks across layers: it sees all layers before any entry moves.

    Args:
        due: each group of layers with its event.

    Raises:
        RuntimeError: the groups' requests differ, or the recipe keeps more than the scheduler expects.
    """
    start, first = time.perf_counter(), due[0][1]
    recipe = first.recipe
    if any(event.rows != first.rows for _, event in due):
        raise RuntimeError("keepset lost count of the requests of an event that looks across layers.")
    parts = [(group, event, entries) for group, event in due for entries in read_event(group, event)]
    parts.sort(key=lambda part: part[2].observation.layer_ids)
    observations = [entries.observation for _, _, entries in parts]
    chosen = recipe.method.select_all(observations, recipe.budget_for(observations))
    kept = [chosen.layer(entries.observation.layer_ids[0]) for _, _, entries in parts]
    assignments = [_assign(event, entries, keep_set) for (_, event, entries), keep_set in zip(parts, kept, strict=True)]
    reads = [[keep_set.heads, *pages.host_reads] for keep_set, pages in zip(kept, assignments, strict=True)]
    LazyHostInts.read([number for numbers in reads for number in numbers])
    for (group, event, entries), keep_set, assignment in zip(parts, kept, assignments, strict=True):
        if not event.is_counted(keep_set):
            raise RuntimeError(f"{recipe} kept another number of entries than its quotas say.")
        execute(group, event, entries, keep_set, assignment, start)
        start = time.perf_counter()


def _assign(event: EvictionEvent, entries: EventEntries, kept: LayerKeepSet) -> PageAssignment:
    return event.pages.assign(entries.places, kept.counts + event.newer)


def read_event(group: LayerGroup, event: EvictionEvent) -> Iterator[EventEntries]:
    """Yield the entries up to the event's point, and the recipe's other inputs, for a few layers at a time.

    How many layers are read together depends on the memory that their entries take.

    Args:
        group: the layers.
        event: the event.
    """
    entry_bytes, kv_heads = group.pages_of(0).entry_bytes, group.kv_heads
    entries, needs = event.pages.width * len(event.rows), group.recipe.method.traits.needs
    together = max_layers_per_event(event.recipe, entries, kv_heads)
    if needs.of(QueryMoments) or any(measured.covariances for measured in needs.of(ModelStatistics)):
        together = min(together, group.ring.layers_at_once(len(event.rows)))
    if group.observer.softmax.sinks is not None:
        together = 1  # an observation has those of one layer
    if event.at.device.type == "cpu":
        together = max(1, min(together, _CPU_WORKSPACE // (entries * kv_heads * entry_bytes)))
    for run in _neighbours(group):
        for first in range(run.start, run.stop, together):
            yield _read_layers(group, event, range(first, min(first + together, run.stop)))


def _neighbours(group: LayerGroup) -> Iterator[range]:
    """Yield the places of layers of a group that are neighbours among all layers that are compressed."""
    indices = [group.all_layers.index(layer) for layer in group.layers]
    starts = [start for start, index in enumerate(indices) if not start or index != indices[start - 1] + 1]
    yield from map(range, starts, [*starts[1:], len(indices)])


def _read_layers(group: LayerGroup, event: EvictionEvent, layer_indices: range) -> EventEntries:
    layers, columns = len(layer_indices), group.columns
    occupied = event.pages.occupied(layer_indices)
    subpages, packed, entries = occupied
    width = event.pages.width - event.newer if event.equal_heads else subpages.shape[-1] * group.block_size
    parts = group.observer.parts(event, layer_indices, occupied, columns, width)
    paged = PagedEntries(group.pages_of(0), subpages, group.formats(layer_indices))
    index = torch.arange(paged.shape[2], device=subpages.device)
    at, prompts, positions, state = event.at.repeat(layers), event.prompts.repeat(layers), None, {}
    if event.compressed:
        slots, moved = columns.slots(subpages)[..., :width], (index < packed[..., None])[..., :width]
        state = {name: columns.read(name, slots).where(moved, 0) for name in group.recipe.method.traits.state_names}
        positions = columns.positions(occupied, at + event.newer)
    observation = PagedObservation(
        paged,
        width,
        positions=None if positions is None else positions[..., :width],
        valid=None if event.equal_heads else (index < (entries - event.newer)[..., None])[..., :width],
        lengths=at,
        prompts=prompts,
        layer_ids=group.layers[layer_indices.start : layer_indices.stop],
        layers=group.all_layers,
        state=state,
        longest=event.latest,
        **parts,
    )
    return EventEntries(layer_indices, entries, paged, positions, observation)


def execute(
    group: LayerGroup,
    event: EvictionEvent,
    entries: EventEntries,
    kept: LayerKeepSet,
    assignment: PageAssignment,
    start: float,
) -> None:
    """Pack the entries that stay, and those that came after the event, into the pages assigned to them.

    Args:
        group: the layers.
        event: the event.
        entries: the entries of some of the layers.
        kept: which of the entries stay.
        assignment: the pages for them.
        start: when the event began, by `time.perf_counter`.
    """
    pages, paged, newer = group.pages_of(0), entries.paged, event.newer
    width, size, kv_heads = paged.shape[2], group.block_size, entries.heads.shape[1]
    index, rank = _survivors(kept, entries.heads, newer, width)
    heads = index // width
    offsets = index - heads * width
    observed = offsets < entries.heads.flatten()[heads] - newer
    values = None if kept.values is None else observed.cumsum(0) - 1
    sizes, counts = [count + newer for count in kept.heads.host_values], event.pages.held(entries.places)
    if assignment.fits is not None and not all(assignment.fits.host_values):
        row_fits = assignment.fits.host_values
        fits = assignment.fits.device_values.bool().repeat_interleave(kv_heads)[heads]
        index, rank, heads, offsets, observed = (part[fits] for part in (index, rank, heads, offsets, observed))
        values = None if values is None else values[fits]
        sizes = [count * row_fits[head // kv_heads] for head, count in enumerate(sizes)]
        counts = [count * fit for count, fit in zip(counts, row_fits, strict=True)]
    subpages = assignment.take(max(sizes))
    page = heads * subpages.shape[-1] + rank // size
    slots = subpages.flatten().index_select(0, page) * size + rank % size
    del page, rank  # as long as the prompts
    # Heads that differ may be assigned pages that others of their layer have left.
    for head_range, part in _workspaces(sizes, 1 if event.equal_heads else kv_heads, pages.entry_bytes):
        moved_keys, moved_values = paged.take(head_range, index[part])
        if kept.values is not None and values is not None:
            fitted = paged.encoded_values(kept.values[values[part].clamp(min=0)], heads[part])
            moved_values = fitted.view(moved_values.dtype).where(observed[part, None], moved_values)
        pages.write(moved_keys, moved_values, slots[part])
        del moved_keys, moved_values  # before the next ones are there
    positions = offsets if entries.positions is None else entries.positions.reshape(-1)[index]
    group.columns.write_positions(slots, positions)
    _write_state(group, kept, slots, heads, offsets, observed)
    if group.count is not None:
        seconds, stays, total = time.perf_counter() - start, sum(sizes), sum(counts)
        events = len(event.rows) if group.layers[entries.places[0]] == group.all_layers[0] else 0
        group.count(events=events, entries_kept=stays, entries_dropped=total - stays, seconds=seconds)
        logger.debug("%d layers kept %d of %d entries in %.1f ms", len(entries.places), stays, total, 1e3 * seconds)


def _write_state(
    group: LayerGroup,
    kept: LayerKeepSet,
    slots: Int[Tensor, " stays"],
    heads: Int[Tensor, " stays"],
    within: Int[Tensor, " stays"],
    observed: Bool[Tensor, " stays"],
) -> None:
    """Write the method's own numbers for later events; entries after those that it saw have none.

    Args:
        group: the layers whose columns are written.
        kept: what the method has chosen, with its numbers per entry.
        slots: the slot of every entry that stays.
        heads: the row of every entry in `kept`: one for every request and KV head.
        within: the index of every entry among those of its head before the event.
        observed: whether the method saw the entry.
    """
    method, columns = group.recipe.method, group.columns
    if BIAS not in kept.state:
        columns.write_no_bias(slots)
    for name, column in kept.state.items():
        if name in columns:
            width = column.shape[-1]
            remembered = column.reshape(-1, width)[heads, within.clamp(max=width - 1)]
            columns.write(name, slots, remembered.where(observed, 0))
        elif name not in method.traits.state_names:
            raise KeepsetError(f"{method.name} remembers {name!r} and does not say so: add it to its `state_names`.")


def _survivors(
    kept: LayerKeepSet, entries: Int[Tensor, "rows kv_heads"], newer: int, width: int
) -> tuple[Int[Tensor, " stays"], Int[Tensor, " stays"]]:
    """Return for every entry that stays, head after head, its flat index `head * width + place` and its rank there.

    Args:
        kept: what the method has chosen.
        entries: entries of every head, with the newer ones.
        newer: how many entries of every head are newer than the event; all of these stay.
        width: entries per head in the padded tensors that the index counts in.
    """
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


def _workspaces(sizes: Sequence[int], unit: int, entry_bytes: int) -> Iterator[tuple[range, slice]]:
    """Yield heads whose entries are moved together, and the range of their entries among all that stay.

    Args:
        sizes: how many entries of every head stay.
        unit: the number of heads that are never divided.
        entry_bytes: bytes of an entry while it is moved.
    """
    starts, units = list(accumulate(sizes, initial=0)), len(sizes) // unit
    together = unit * max(1, units * WORKSPACE // max(starts[-1] * entry_bytes, 1))
    for first in range(0, len(sizes), together):
        heads = range(first, min(first + together, len(sizes)))
        yield heads, slice(starts[heads.start], starts[heads.stop])


class EventQueue:
    """Plans the steps of all groups of layers, and executes their events.

    Attributes:
        steps: for each group the step that was planned last, whose events are due.
    """

    def __init__(self, emptied_blocks: EmptiedBlocks) -> None:
        self._emptied_blocks = emptied_blocks
        self.steps: dict[LayerGroup, StepPlan] = {}

    def plan(self, group: LayerGroup, batch: StepBatch) -> StepPlan:
        """Execute the events that are due after the last step, and plan the next step of a group's layers.

        Every step is planned for all groups, in any order, before it is computed.

        Args:
            group: the layers.
            batch: the step, as the engine has scheduled it.

        Returns:
            What the layers do in the step.

        Raises:
            RuntimeError: a compressed request is not where it was left.
        """
        if group in self.steps:
            self.run()
        plan = self.steps[group] = group.planner.plan(batch)
        return plan

    def run(self) -> None:
        """Execute what is due after the steps that were planned last, in the order that `StepPlan` lists."""
        steps, self.steps = self.steps, {}
        has_events = False
        for group, plan in steps.items():
            group.record_replayed(plan)
        for group, plan in steps.items():
            if plan.before_events:
                group.run(plan.before_events)
            has_events |= bool(plan.events)
        if has_events:
            self._run_events(steps)
        for group, plan in steps.items():
            if plan.after_events:
                group.run(plan.after_events)

    def _run_events(self, steps: dict[LayerGroup, StepPlan]) -> None:
        if next(iter(steps)).recipe.method.traits.across_layers:
            for events in zip(*(plan.events for plan in steps.values()), strict=True):
                compress_across(list(zip(steps, events, strict=True)))
        else:
            for group, plan in steps.items():
                for event in plan.events:
                    compress(group, event)
        for group, plan in steps.items():
            for event in plan.events:
                for record in event.records:
                    group.columns.forget(record.slot)
        self._emptied_blocks.settle()
