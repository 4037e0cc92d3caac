"""Heads that keep equally many entries: one block table serves all, shifted by what was dropped.

What an event leaves is packed into logical slots from `dropped // block_size` blocks on; the blocks before are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from keepset.kernels.shift import shift_step
from keepset.paged.capture import CapturePlanner
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.page_tables import OccupiedPages
from keepset.paged.step import ScheduledRequest, ShiftedBatch, StepBatch, StepPlan


class UniformPlanner:
    """Tables, slots and events of a step.

    All that the host knows of it goes to the device at once, and nothing comes back. Attention gets the same two
    tensors in every step, so that a graph may have noted where they are.
    """

    def __init__(self, schedule: EvictionSchedule, capture: CapturePlanner, max_requests: int) -> None:
        self._schedule, self._capture, self._max_requests = schedule, capture, max_requests
        self._left: tuple[Tensor, Tensor] | None = None

    def plan(self, batch: StepBatch, plan: StepPlan) -> None:
        """Adds to the step's plan what is shifted and what is compressed."""
        schedule = self._schedule
        dropped = [0] * len(batch.seq_lens)
        groups: defaultdict[tuple[int, int, int, bool, bool], list[ScheduledRequest]] = defaultdict(list)
        for request in batch.requests:
            prompt, after = request.prompt, request.after
            gone = dropped[request.row] = schedule.dropped(prompt, request.before)
            if at := schedule.due(prompt, request.before, after):
                left = after - schedule.dropped(prompt, after)
                groups[after - gone, after - at, left, gone > 0, at == prompt].append(request)
        lost, *numbers = batch.tensors(dropped, *(each for group in groups.items() for each in self._numbers(*group)))
        for place, ((width, newer, left, compressed, _), requests) in enumerate(groups.items()):
            rows, points, prompts, tokens, kept = numbers[5 * place : 5 * place + 5]
            pages = self._pages(batch, rows, tokens, kept, width, left)
            event = self._capture.event(rows, points, prompts, requests, newer, width, left - newer, compressed, *pages)
            plan.events.append(event)
        plan.shifted = self._shift(batch, dropped, lost)

    def _numbers(
        self, group: tuple[int, int, int, bool, bool], requests: list[ScheduledRequest]
    ) -> tuple[list[int], ...]:
        """Of these requests of an event rows, points, prompts, tokens, and entries that the event before has kept."""
        width, newer, _, compressed, _ = group
        # Nothing was packed at events that dropped nothing: what came since the one before is whole.
        kept = [
            self._schedule.compressed(request.prompt, request.before) - (request.after - width) if compressed else 0
            for request in requests
        ]
        after = [request.after for request in requests]
        points = [tokens - newer for tokens in after]
        return [request.row for request in requests], points, [request.prompt for request in requests], after, kept

    def _pages(
        self, batch: StepBatch, rows: Tensor, after: Tensor, kept: Tensor, width: int, left: int
    ) -> tuple[Callable[[int], OccupiedPages], Callable[[int, Tensor], Tensor]]:
        """Entries lie in their blocks from the first that is not freed; and so they will afterwards, in any layer."""
        size, kv_heads = self._schedule.block_size, self._schedule.kv_heads
        heads = torch.arange(kv_heads, device=rows.device)[:, None]

        def subpages(entries: int) -> Tensor:
            first = (after - entries)[:, None] // size
            columns = first + torch.arange(-(-entries // size), device=rows.device)
            return batch.block_table[rows[:, None], columns].long()[:, None] * kv_heads + heads

        shape = (len(rows), kv_heads)
        entries = torch.full(shape, width, device=rows.device)
        occupied, now = OccupiedPages(subpages(width), kept[:, None].expand(shape), entries), subpages(left)
        return lambda _: occupied, lambda *_: now

    def _shift(self, batch: StepBatch, dropped: list[int], lost: Tensor) -> ShiftedBatch:
        """The batch without what was dropped; moves new tokens' slots to where their requests' entries end."""
        rows, width = batch.block_table.shape
        if self._left is None:
            most = max(rows, self._max_requests)
            self._left = batch.block_table.new_zeros(most, width), batch.seq_lens.new_zeros(most)
        table, lengths = (each[:rows] for each in self._left)
        step = batch.block_table, batch.seq_lens, batch.starts
        shift_step(*step, lost, batch.slot_mapping, self._schedule.block_size, table, lengths)
        most_entries = max((request.after - dropped[request.row] for request in batch.requests), default=None)
        return ShiftedBatch(block_table=table, seq_lens=lengths, max_seq_len=most_entries, dropped=dropped)
