"""`PagedLayer`: what one attention layer does in a step besides attending, and how it executes a KeepSet in pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.keep_set import LayerKeepSet
from keepset.core.observation import Observation
from keepset.core.rope import RotaryTable
from keepset.errors import KeepsetError
from keepset.paged.engine import Pages, QueryProjection
from keepset.paged.entry_columns import EntryColumns, columns_of
from keepset.paged.layer_barrier import LayerBarrier
from keepset.paged.observer import Observer
from keepset.paged.page_tables import OccupiedPages
from keepset.paged.passing import PassingQueries
from keepset.paged.planner import Planner
from keepset.paged.step import EvictionEvent, StepPlan

logger = logging.getLogger(__name__)

CountEviction = Callable[..., None]
"""Is told by keyword of a layer's compression: `events` (requests; 0 in all layers but the first), `entries_kept`,
`entries_dropped`, and `seconds`."""


class LayerEvent(NamedTuple):
    """An event that a layer has reached, whose entries stay in their pages for now.

    The method will see `width` places of entries, and `parts` of the Observation besides them.
    """

    event: EvictionEvent
    pages: Pages
    occupied: OccupiedPages
    width: int
    parts: dict[str, Any]


class LayerEntries(NamedTuple):
    """The entries of a layer at an event: all of them in keys, values and positions, in the observation up to it."""

    keys: Float[Tensor, "rows kv_heads places head_dim"]
    values: Float[Tensor, "rows kv_heads places head_dim"]
    positions: Int[Tensor, "rows kv_heads places"]
    observation: Observation


class PagedLayer:
    """One layer of a planner's group.

    What an entry is, apart from key and value, lies in columns of its own that are indexed by the same slots: its
    original position, and whatever the method remembers of it. So all of it moves, and is forgotten, together.

    Args:
        planner: of the group.
        place: the layer's in the group.
        passing: what the layer holds of queries, with room for the planner's slots.
        scaling: what the model multiplies query-key products with.
        rotary: of the model, where the recipe looks at queries before rotation.
        projection: of the layer, where the recipe looks at hidden states.
        barrier: of all layers, where the recipe looks across layers.
        count: is told of every compression; of several ranks, one's counts.
    """

    def __init__(
        self,
        planner: Planner,
        place: int,
        passing: PassingQueries,
        scaling: float,
        rotary: RotaryTable | None,
        projection: QueryProjection | None,
        barrier: LayerBarrier | None,
        count: CountEviction | None,
    ) -> None:
        schedule = planner.schedule
        self.layer, self.layers, self.recipe = planner.layers[place], schedule.layers, schedule.recipe
        self._block_size, self._place, self._passing = schedule.block_size, place, passing
        self._barrier, self._count = barrier, count
        needs = self.recipe.method.needs
        self._observer = Observer(needs, planner.recording, passing, place, scaling, rotary, projection)
        self._columns: EntryColumns | None = None

    def after_attention(self, plan: StepPlan, queries: Float[Tensor, "n query_heads head_dim"], pages: Pages) -> None:
        """Records what events will look at, and executes those of this step.

        Args:
            plan: of the layer's group.
            queries: of the step, after rotation.
            pages: the layer's cache, with the step's entries in it.
        """
        if self._columns is None:
            names = columns_of(self.recipe)
            self._columns = EntryColumns(names, pages.columns(len(names)), self._block_size)
        for chunk in plan.chunks:
            self._observer.collect(chunk, queries, pages)
        for addition in plan.added_first:
            self._observer.add_up(addition, queries, pages, self._columns)
        if plan.captured_before is not None:
            self._passing.record(queries, plan.captured_before)
        for addition in plan.added:
            self._observer.add_up(addition, queries, pages, self._columns)
        if plan.events and self._barrier is not None:
            self._barrier.add(self, [self._reach(event, pages) for event in plan.events])
        else:
            for event in plan.events:
                start = time.perf_counter()
                reached = self._reach(event, pages)
                entries = self.read(reached)
                self.execute(reached, entries, self._select(entries.observation, event), start)
        if plan.captured_after is not None:
            self._passing.record(queries, plan.captured_after)
        for held in plan.held:
            self._passing.hold(queries, held)

    def _reach(self, event: EvictionEvent, pages: Pages) -> LayerEvent:
        assert self._columns is not None
        occupied = event.occupied(self._place)
        width = event.width - event.newer if event.equal_heads else occupied.subpages.shape[-1] * self._block_size
        return LayerEvent(event, pages, occupied, width, self._observer.parts(event, occupied, self._columns, width))

    def read(self, reached: LayerEvent) -> LayerEntries:
        """What the method may look at: everything up to the event's point."""
        event, width, columns = reached.event, reached.width, self._columns
        assert columns is not None
        subpages, kept, entries = reached.occupied
        keys, values = reached.pages.read(subpages)
        positions = columns.positions(reached.occupied, event.at + event.newer)
        place, state = torch.arange(keys.shape[2], device=keys.device), {}
        if event.compressed:
            slots, moved = columns.slots(subpages)[..., :width], (place < kept[..., None])[..., :width]
            state = {name: columns[name][slots].where(moved, 0) for name in self.recipe.method.remembers}
        observation = Observation(
            keys=keys[:, :, :width],
            values=values[:, :, :width],
            positions=positions[..., :width] if event.compressed else None,
            valid=None if event.equal_heads else (place < (entries - event.newer)[..., None])[..., :width],
            lengths=event.at,
            prompts=event.prompts,
            layer=self.layer,
            layers=self.layers,
            state=state,
            **reached.parts,
        )
        return LayerEntries(keys, values, positions, observation)

    def _select(self, observation: Observation, event: EvictionEvent) -> LayerKeepSet:
        """The recipe's choice, which must be of the size that the scheduler counts with."""
        method, budget = self.recipe.method, self.recipe.budget
        kept = method.select(observation, budget).layer(self.layer)
        if event.is_counted(kept):
            return kept
        # A request that starts again after a preemption has more to choose from than one that was compressed all
        # along, so a number that depends on it comes out differently. How many stay must not.
        assert event.keep is not None
        share = torch.full_like(kept.counts, event.keep)
        return method.choose(method.ranked(observation, budget, share))

    def execute(self, reached: LayerEvent, entries: LayerEntries, kept: LayerKeepSet, start: float) -> None:
        """Packs what stays, and what came after the event; `start` is when the compression began."""
        event, before, size = reached.event, reached.occupied.entries, self._block_size
        places = entries.keys.shape[2]
        index, rank = _survivors(kept, before, event.newer, places)
        heads = index // places
        counts = kept.counts + event.newer
        subpages = event.reassign(self._place, counts)
        if subpages is None:
            return
        slots = subpages.reshape(-1).index_select(0, heads * subpages.shape[-1] + rank // size) * size + rank % size
        keys, values = (column.flatten(0, 2).index_select(0, index) for column in (entries.keys, entries.values))
        if kept.values is not None:
            values[: len(kept.values)] = kept.values  # what came after the event follows
        reached.pages.write(keys, values, slots)
        columns = self._columns
        assert columns is not None
        columns.write_positions(slots, entries.positions.reshape(-1)[index])
        if self.recipe.schedule.every is not None:
            self._remember(columns, kept, slots, heads, index - heads * places)
        if self._count is not None:
            stays, total = int(counts.sum()), int(before.sum())
            seconds = time.perf_counter() - start
            events = len(event.rows) if self.layer == self.layers[0] else 0
            self._count(events=events, entries_kept=stays, entries_dropped=total - stays, seconds=seconds)
            logger.debug("layer %d kept %d of %d entries in %.1f ms", self.layer, stays, total, 1e3 * seconds)

    def _remember(
        self,
        columns: EntryColumns,
        kept: LayerKeepSet,
        slots: Int[Tensor, " stays"],
        heads: Int[Tensor, " stays"],
        within: Int[Tensor, " stays"],
    ) -> None:
        """Writes the method's own numbers; entries that it has not seen have none yet."""
        for name, column in kept.state.items():
            if name not in columns:
                method = self.recipe.method.name
                raise KeepsetError(f"{method} remembers {name!r} and does not say so: add it to its `remembers`.")
            known = column.shape[-1]
            remembered = column.reshape(-1, known)[heads, within.clamp(max=known - 1)]
            columns[name][slots] = torch.where(within < known, remembered, 0).float()


def _survivors(
    kept: LayerKeepSet, entries: Int[Tensor, "rows kv_heads"], newer: int, width: int
) -> tuple[Int[Tensor, " kept"], Int[Tensor, " kept"]]:
    """Flat index of every entry that stays, `head * width + place`, and its rank in its head afterwards."""
    heads = kept.rows
    rank = torch.arange(heads.shape[0], device=heads.device) - kept.cu_seqlens[heads]
    index = heads * width + kept.indices
    if not newer:
        return index, rank
    counts, ends = kept.counts.flatten(), entries.flatten() - newer
    every = torch.arange(counts.shape[0], device=heads.device).repeat_interleave(newer)
    nth = torch.arange(newer, device=heads.device).repeat(counts.shape[0])
    return torch.cat([index, every * width + ends[every] + nth]), torch.cat([rank, counts[every] + nth])
