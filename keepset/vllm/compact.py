"""`Compactor`: executes a KeepSet in pages. Reads a layer's entries, asks the recipe, packs what stays."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.keep_set import LayerKeepSet
from keepset.observation import Observation, QueryMoments
from keepset.statistics import load
from keepset.vllm.moments import event_moments
from keepset.vllm.pages import Pages
from keepset.vllm.rotation import Rotation
from keepset.vllm.stats import worker_stats
from keepset.vllm.step import Event, Planner

logger = logging.getLogger(__name__)


class Compactor:
    """The compressions of one layer.

    What an entry is, apart from key and value, lies in columns of its own that are indexed by the same slots: its
    original position, and whatever the method remembers of it. So all of it moves, and is forgotten, together.

    Args:
        planner: of the layer's group.
        name: the layer's.
        scaling: what the model multiplies query-key products with.
        rotation: of the model, where the recipe looks at queries before rotation.
        counted: whether this process's compressions are counted; of several ranks, one's are.
    """

    def __init__(self, planner: Planner, name: str, scaling: float, rotation: Rotation | None, counted: bool) -> None:
        self._planner, self._place, self._layer = planner, planner.place(name), planner.layers[name]
        self._scaling, self._rotation, self._counted = scaling, rotation, counted
        self._recipe, self._layers = planner.timeline.recipe, planner.all_layers
        self._statistics = {file: load(file) for file in self._recipe.method.needs.statistics}
        self._positions: Tensor | None = None
        self._state: dict[str, Tensor] = {}

    def compress(self, event: Event, pages: Pages, slots: int) -> None:
        """Executes one event.

        Args:
            event: what is to be compressed.
            pages: the layer's cache.
            slots: how many slots it has.
        """
        start = time.perf_counter()
        before, counts, entries = self._planner.held(event, self._place)
        keys, values = pages.read(before)
        observation, positions = self._observe(event, keys, values, before, counts, entries)
        kept = self._select(observation, event)
        index, rank = _survivors(kept, entries, event.newer, keys.shape[2])
        heads = index // keys.shape[2]
        left = kept.counts + event.newer
        after = self._planner.settle(event, self._place, left)
        if after is None:
            return
        width = after.shape[-1]
        target = after.reshape(-1).index_select(0, heads * width + rank // self._planner.block_size)
        target = target * self._planner.block_size + rank % self._planner.block_size
        pages.write(_rows(keys, index), _rows(values, index), target)
        self._remember(slots, target, heads, index, keys.shape[2], positions, observation)
        if self._counted:
            stays, total = int(left.sum()), int(entries.sum())
            seconds = time.perf_counter() - start
            worker_stats().compressed(
                len(event.rows) if self._layer == self._layers[0] else 0, stays, total - stays, seconds
            )
            logger.debug("layer %d kept %d of %d entries in %.1f ms", self._layer, stays, total, 1e3 * seconds)

    def _observe(
        self, event: Event, keys: Tensor, values: Tensor, before: Tensor, counts: Tensor, entries: Tensor
    ) -> tuple[Observation, Tensor]:
        """What the method may look at: everything up to the event's point."""
        width = event.width - event.newer if event.level else keys.shape[2]
        place = torch.arange(keys.shape[2], device=keys.device)
        moved = place < counts[..., None]
        # Entries that came after the event before are whole: each lies as far behind its position as were dropped.
        positions = place + (event.at + event.newer)[:, None, None] - entries[..., None]
        slots = None
        if self._positions is not None and event.compressed:
            slots = (before * self._planner.block_size)[..., None] + torch.arange(
                self._planner.block_size, device=keys.device
            )
            slots = slots.flatten(2)
            positions = torch.where(moved, self._positions[slots].long(), positions)
        state = {
            name: column[slots].where(moved, 0)[..., :width]
            for name, column in self._state.items()
            if slots is not None
        }
        whole = not event.compressed
        observation = Observation(
            keys=keys[:, :, :width],
            values=values[:, :, :width],
            positions=None if whole else positions[..., :width],
            valid=None if event.level else (place < (entries - event.newer)[..., None])[..., :width],
            lengths=event.at,
            prompts=event.prompts,
            statistics=self._statistics,
            scaling=self._scaling,
            layer=self._layer,
            layers=self._layers,
            state=state,
            **self._queries(event, whole and event.level),
        )
        return observation, positions

    def _queries(self, event: Event, unbroken: bool) -> dict[str, Any]:
        """The recorded queries' part of an Observation."""
        needs = self._recipe.method.needs
        parts: dict[str, Any] = {}
        if needs.window:
            assert event.slots is not None and event.window is not None
            window = event.window[:, -needs.window :]
            parts["queries"] = self._planner.windows.read(self._place, event.slots, window)
            if not unbroken or event.short:  # the default says that nothing is missing, which is cheaper
                parts["query_positions"] = window
        if needs.query_moments:
            rotation = self._rotation
            assert rotation is not None
            parts["query_moments"] = {
                skip: QueryMoments(
                    *event_moments(self._planner.windows, self._place, event, rotation, skip, needs.buffer),
                    lambda rows, future: rotation.ahead(rows, event.at, future),
                )
                for skip in needs.query_moments
            }
        return parts

    def _select(self, observation: Observation, event: Event) -> LayerKeepSet:
        """The recipe's choice, which must be of the size that the scheduler counts with."""
        method, budget = self._recipe.method, self._recipe.budget
        state = dict(observation.state)
        kept = method.select(observation, budget).layer(self._layer)
        if event.keep is None:
            return kept
        share = torch.full_like(kept.counts, event.keep)
        if (
            torch.equal(kept.counts, share)
            if method.equal_heads
            else bool((kept.counts.sum(-1) <= share.sum(-1)).all())
        ):
            return kept
        # A request that starts again after a preemption has more to choose from than one that was compressed all
        # along, so a number that depends on it comes out differently. How many stay must not.
        observation.state.clear()
        observation.state.update(state)
        return observation.keep(
            method.choose(observation, budget, method.ranked(observation, budget, share), share)
        ).layer(self._layer)

    def _remember(
        self,
        slots: int,
        target: Int[Tensor, " kept"],
        heads: Int[Tensor, " kept"],
        index: Int[Tensor, " kept"],
        width: int,
        positions: Tensor,
        observation: Observation,
    ) -> None:
        """Writes what belongs to the entries that stay beside them."""
        if self._positions is None:
            self._positions = torch.zeros(slots, dtype=torch.int32, device=target.device)
        self._positions[target] = positions.reshape(-1)[index].int()
        for name, column in observation.state.items():
            if name not in self._state:
                self._state[name] = column.new_zeros(slots)
            within = index - heads * width
            known = within < column.shape[-1]
            rows = column.reshape(-1, column.shape[-1])
            self._state[name][target] = torch.where(known, rows[heads, within.clamp(max=column.shape[-1] - 1)], 0)


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
