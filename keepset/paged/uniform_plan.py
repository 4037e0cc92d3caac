"""Heads that keep equally many entries: one block table serves all, shifted by what was dropped.

What an event leaves is packed into logical slots from `dropped // block_size` blocks on; the blocks before are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.kernels import page_layout
from keepset.kernels.compact_block_table import shift_step
from keepset.kernels.page_layout import PageGroup, PageLayout
from keepset.kernels.paged_arguments import EntriesInPages
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.page_tables import EventPages, OccupiedPages, PageAssignment
from keepset.paged.recording_plan import CapturePlanner
from keepset.paged.step import ScheduledRequest, ShiftedBatch, StepBatch, StepPlan, in_blocks
from keepset.recipe import Recipe


class UniformPages(EventPages):
    """The pages of an event's requests, the same in every layer.

    Args:
        one: layer's.
        now: sub-pages for what stays, in one layer.
        width: entries of every head.
        group: the layers.
    """

    def __init__(
        self, one: OccupiedPages, now: Int[Tensor, "rows kv_heads pages"], width: int, group: PageGroup
    ) -> None:
        self._one, self._now, self._width, self._group = one, now, width, group

    @property
    def width(self) -> int:
        return self._width

    def held(self, places: range) -> Sequence[int]:
        rows, kv_heads = self._one.entries.shape
        return [self._width * kv_heads] * (rows * len(places))

    def occupied(self, places: range) -> OccupiedPages:
        _, packed, entries = self._one
        there = (part.repeat(len(places), 1) for part in (packed, entries))
        return OccupiedPages(self._through(self._one.subpages, places), *there)

    def deal(self, places: range, counts: Int[Tensor, "layers_rows kv_heads"]) -> PageAssignment:
        return PageAssignment(None, lambda most: self._through(self._now, places))

    def _through(
        self, one: Int[Tensor, "rows kv_heads pages"], places: range
    ) -> Int[Tensor, "layers_rows kv_heads pages"]:
        layers = one.expand(len(places), -1, -1, -1)
        return page_layout.to_group_pages(layers, self._group._replace(places=places), one.shape[1]).flatten(0, 1)


class UniformPlanner:
    """Tables, slots and events of a step.

    Attention gets the same two tensors in every step, so that a graph may have noted where they are.
    """

    def __init__(
        self, schedule: EvictionSchedule, capture: CapturePlanner, group: PageGroup, max_requests: int
    ) -> None:
        self._schedule, self._capture, self._group, self._max_requests = schedule, capture, group, max_requests
        self._left: tuple[Tensor, Tensor] | None = None

    def plan(self, batch: StepBatch, plan: StepPlan) -> None:
        """Adds to the step's plan what is shifted and what is compressed."""
        dropped = [0] * batch.block_table.shape[0]
        groups: defaultdict[tuple[Recipe, int, int, int, bool, bool], list[ScheduledRequest]] = defaultdict(list)
        for request in batch.requests:
            prompt, after, schedule = request.prompt, request.after, request.own or self._schedule
            gone = dropped[request.row] = schedule.dropped(prompt, request.before)
            if at := schedule.due(prompt, request.before, after):
                left = after - schedule.dropped(prompt, after)
                groups[schedule.recipe, after - gone, after - at, left, gone > 0, at == prompt].append(request)
        for (recipe, width, newer, left, compressed, _), members in groups.items():
            for requests in in_blocks(recipe, members, [width] * len(members), self._schedule.kv_heads):
                occupied, now = self._occupied(batch, requests), self._subpages(batch, requests, left)
                pages = UniformPages(occupied, now, width, self._group)
                sizes = newer, [left - newer] * len(requests), compressed
                plan.events.append(self._capture.event(recipe, batch, requests, *sizes, pages))
        plan.shifted = self._shift(batch, dropped)

    def entries(self, batch: StepBatch, requests: Sequence[ScheduledRequest]) -> Callable[[], EntriesInPages]:
        """Where the entries of these requests lie in every layer, before the step's events.

        Pages that no head has taken for itself alone: as after an event that left nothing.
        """
        numbers = self._held(requests)
        known = [
            (one.row, one.after, one.after - width, kept) for one, (width, kept) in zip(requests, numbers, strict=True)
        ]
        rows, lengths, gone, kept = batch.tensor(known).t().contiguous().unbind()
        packed = kept[:, None, None].expand(-1, 1, self._schedule.kv_heads).contiguous()
        gone, none = gone[:, None], torch.zeros_like(packed)
        layout = PageLayout(none, gone, gone // self._schedule.block_size, none[..., 0].contiguous())
        longest = max(width for width, _ in numbers)
        held = EntriesInPages(layout, batch.block_table[rows], lengths, packed, longest)
        return lambda: held

    def _occupied(self, batch: StepBatch, requests: Sequence[ScheduledRequest]) -> OccupiedPages:
        """The same for an event, which reads whole pages."""
        numbers = self._held(requests)
        shape = (len(requests), self._schedule.kv_heads)
        entries, packed = (part[:, None].expand(shape) for part in batch.tensor(numbers).unbind(1))
        return OccupiedPages(self._subpages(batch, requests, *(width for width, _ in numbers)), packed, entries)

    def _held(self, requests: Sequence[ScheduledRequest]) -> list[tuple[int, int]]:
        """Entries of each head, and how many of them it kept at the event before."""
        numbers = []
        for request in requests:
            schedule = request.own or self._schedule
            width, kept = request.after - schedule.dropped(request.prompt, request.before), 0
            # Nothing was packed at events that dropped nothing: what came since the one before is whole.
            if width < request.after:
                kept = schedule.compressed(request.prompt, request.before) - (request.after - width)
            numbers.append((width, kept))
        return numbers

    def _subpages(
        self, batch: StepBatch, requests: Sequence[ScheduledRequest], *entries: int
    ) -> Int[Tensor, "rows kv_heads pages"]:
        """That hold so many entries of each request: they lie in its blocks from the first that is not freed."""
        size, kv_heads = self._schedule.block_size, self._schedule.kv_heads
        widths = entries * len(requests) if len(entries) == 1 else entries
        firsts = [(one.row, (one.after - width) // size) for one, width in zip(requests, widths, strict=True)]
        row, first = batch.tensor(firsts).unbind(1)
        place = torch.arange(-(-max(widths) // size), device=row.device)
        columns = (first[:, None] + place).clamp(max=batch.block_table.shape[1] - 1)
        heads = torch.arange(kv_heads, device=row.device)[:, None]
        return batch.block_table[row[:, None], columns].long()[:, None] * kv_heads + heads

    def _shift(self, batch: StepBatch, dropped: list[int]) -> ShiftedBatch:
        """The batch without what was dropped; moves new tokens' slots to where their requests' entries end."""
        rows, width = batch.block_table.shape
        if self._left is None:
            most = max(rows, self._max_requests)
            self._left = batch.block_table.new_zeros(most, width), batch.seq_lens.new_zeros(most)
        table, lengths = (each[:rows] for each in self._left)
        step = batch.block_table, batch.seq_lens, batch.starts, batch.tensor(dropped), batch.slot_mapping
        shift_step(*step, self._schedule.block_size, table, lengths)
        longest = max((request.after - dropped[request.row] for request in batch.requests), default=None)
        return ShiftedBatch(block_table=table, seq_lens=lengths, max_seq_len=longest, dropped=dropped)
