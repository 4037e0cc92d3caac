"""`Compactor`: executes a KeepSet in pages. Reads a layer's entries, asks the recipe, packs what stays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.keep_set import LayerKeepSet
from keepset.core.observation import Observation
from keepset.paged.engine import Pages
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.observer import Observer
from keepset.paged.step import EvictionEvent, OccupiedPages

logger = logging.getLogger(__name__)

CountEviction = Callable[[int, int, int, float], None]
"""Is told of a layer's compression: requests (0 in all layers but the first), entries kept, dropped, and seconds."""


@dataclass(frozen=True)
class LayerEvent:
    """An event that a layer has reached, and what the layer alone knows of it.

    Attributes:
        event: it.
        pages: the layer's cache.
        occupied: where its entries lie.
        parts: of the Observation, all but the entries.
    """

    event: EvictionEvent
    pages: Pages
    occupied: OccupiedPages
    parts: dict[str, Any]


@dataclass(frozen=True)
class LayerEntries:
    """The entries of a layer at an event: all of them in keys, values and positions, in the observation up to it."""

    keys: Float[Tensor, "rows kv_heads places head_dim"]
    values: Float[Tensor, "rows kv_heads places head_dim"]
    positions: Int[Tensor, "rows kv_heads places"]
    observation: Observation


class Compactor:
    """The compressions of one layer.

    What an entry is, apart from key and value, lies in columns of its own that are indexed by the same slots: its
    original position, and whatever the method remembers of it. So all of it moves, and is forgotten, together.

    Args:
        schedule: of the layer's group.
        layer: the layer's index in the model.
        place: the layer's in its group.
        observer: collects what the recipe looks at.
        count: is told of every compression; of several ranks, one's counts.
    """

    def __init__(
        self,
        schedule: EvictionSchedule,
        layer: int,
        place: int,
        observer: Observer,
        count: CountEviction | None,
    ) -> None:
        self.layer, self.layers, self.recipe = layer, schedule.layers, schedule.recipe
        self._block_size, self._place, self._observer, self._count = schedule.block_size, place, observer, count
        self._positions: Tensor | None = None
        self._state: dict[str, Tensor] = {}

    def compress(self, event: EvictionEvent, pages: Pages) -> None:
        """Executes one event."""
        start = time.perf_counter()
        reached = self.begin(event, pages)
        entries = self.read(reached)
        self.execute(reached, entries, self._select(entries.observation, event), start)

    def begin(self, event: EvictionEvent, pages: Pages) -> LayerEvent:
        """What this layer alone knows of an event; entries stay in their pages for now."""
        occupied = event.pages.occupied(self._place)
        width = self._width(event, occupied.subpages)
        parts = self._observer.parts(event, width, unbroken=event.equal_heads and not event.compressed)
        return LayerEvent(event, pages, occupied, parts)

    def read(self, reached: LayerEvent) -> LayerEntries:
        """What the method may look at: everything up to the event's point."""
        event, size = reached.event, self._block_size
        subpages, kept, entries = reached.occupied
        keys, values = reached.pages.read(subpages)
        width = self._width(event, subpages)
        place = torch.arange(keys.shape[2], device=keys.device)
        moved = place < kept[..., None]
        # Entries that came after the event before are whole: each lies as far behind its position as were dropped.
        positions = place + (event.at + event.newer)[:, None, None] - entries[..., None]
        slots = None
        if self._positions is not None and event.compressed:
            slots = (subpages * size)[..., None] + torch.arange(size, device=keys.device)
            slots = slots.flatten(2)
            positions = torch.where(moved, self._positions[slots].long(), positions)
        state = {
            name: column[slots].where(moved, 0)[..., :width]
            for name, column in self._state.items()
            if slots is not None
        }
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

    def execute(self, reached: LayerEvent, entries: LayerEntries, kept: LayerKeepSet, start: float) -> None:
        """Packs what stays, and what came after the event; `start` is when the compression began."""
        event, before, size = reached.event, reached.occupied.entries, self._block_size
        places = entries.keys.shape[2]
        index, rank = _survivors(kept, before, event.newer, places)
        heads = index // places
        counts = kept.counts + event.newer
        subpages = event.pages.reassign(self._place, counts)
        if subpages is None:
            return
        slots = subpages.reshape(-1).index_select(0, heads * subpages.shape[-1] + rank // size) * size + rank % size
        reached.pages.write(_rows(entries.keys, index), _rows(entries.values, index), slots)
        self._remember(reached.pages.slots, slots, heads, index, entries, kept.state)
        if self._count is not None:
            stays, total = int(counts.sum()), int(before.sum())
            seconds = time.perf_counter() - start
            self._count(len(event.rows) if self.layer == self.layers[0] else 0, stays, total - stays, seconds)
            logger.debug("layer %d kept %d of %d entries in %.1f ms", self.layer, stays, total, 1e3 * seconds)

    def _width(self, event: EvictionEvent, subpages: Int[Tensor, "rows kv_heads pages"]) -> int:
        """Places of entries that the method sees."""
        return event.width - event.newer if event.equal_heads else subpages.shape[-1] * self._block_size

    def _select(self, observation: Observation, event: EvictionEvent) -> LayerKeepSet:
        """The recipe's choice, which must be of the size that the scheduler counts with."""
        method, budget = self.recipe.method, self.recipe.budget
        kept = method.select(observation, budget).layer(self.layer)
        if as_counted(kept, event, method.equal_heads):
            return kept
        # A request that starts again after a preemption has more to choose from than one that was compressed all
        # along, so a number that depends on it comes out differently. How many stay must not.
        assert event.keep is not None
        share = torch.full_like(kept.counts, event.keep)
        return method.choose(method.ranked(observation, budget, share))

    def _remember(
        self,
        slots: int,
        target: Int[Tensor, " kept"],
        heads: Int[Tensor, " kept"],
        index: Int[Tensor, " kept"],
        entries: LayerEntries,
        state: Mapping[str, Tensor],
    ) -> None:
        """Writes what belongs to the entries that stay beside them."""
        if self._positions is None:
            self._positions = torch.zeros(slots, dtype=torch.int32, device=target.device)
        self._positions[target] = entries.positions.reshape(-1)[index].int()
        for name, column in state.items():
            if name not in self._state:
                self._state[name] = column.new_zeros(slots)
            within = index - heads * entries.keys.shape[2]
            known = within < column.shape[-1]
            rows = column.reshape(-1, column.shape[-1])
            self._state[name][target] = torch.where(known, rows[heads, within.clamp(max=column.shape[-1] - 1)], 0)


def as_counted(kept: LayerKeepSet, event: EvictionEvent, equal_heads: bool) -> bool:
    """Whether a layer keeps as many entries as the scheduler counts with."""
    if event.keep is None:
        return True
    share = torch.full_like(kept.counts, event.keep)
    return torch.equal(kept.counts, share) if equal_heads else bool((kept.counts.sum(-1) <= share.sum(-1)).all())


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
    return (
        torch.cat([index, every * width + ends[every] + nth]),
        torch.cat([rank, counts[every] + nth]),
    )


def _rows(column: Float[Tensor, "rows kv_heads places dim"], index: Int[Tensor, " kept"]) -> Float[Tensor, "kept dim"]:
    return column.reshape(-1, column.shape[-1]).index_select(0, index)
