"""Heads that keep equally many entries: one block table serves all, shifted by what was dropped.

What an event leaves is packed into logical slots from `dropped // block_size` blocks on; the blocks before are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from keepset.paged.capture import CapturePlanner
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.page_tables import OccupiedPages, new_tokens
from keepset.paged.step import ScheduledRequest, ShiftedBatch, StepBatch, StepPlan


class UniformPlanner:
    """Tables, slots and events of a step."""

    def __init__(self, schedule: EvictionSchedule, capture: CapturePlanner) -> None:
        self._schedule, self._capture = schedule, capture

    def plan(self, batch: StepBatch, plan: StepPlan) -> None:
        """Adds to the step's plan what is shifted and what is compressed."""
        schedule = self._schedule
        dropped = [0] * batch.block_table.shape[0]
        groups: defaultdict[tuple[int, int, int, bool, bool], list[ScheduledRequest]] = defaultdict(list)
        for request in batch.requests:
            prompt, after = request.prompt, request.after
            gone = dropped[request.row] = schedule.dropped(prompt, request.before)
            if at := schedule.due(prompt, request.before, after):
                left = after - schedule.dropped(prompt, after)
                groups[after - gone, after - at, left, gone > 0, at == prompt].append(request)
        for (width, newer, left, compressed, _), requests in groups.items():
            rows = batch.tensor([request.row for request in requests])
            pages = self._pages(batch, rows, requests, width, left, compressed)
            event = self._capture.event(batch, rows, requests, newer, width, left - newer, compressed, *pages)
            plan.events.append(event)
        if any(dropped):
            plan.shifted = self._shift(batch, dropped)

    def _pages(
        self, batch: StepBatch, rows: Tensor, requests: list[ScheduledRequest], width: int, left: int, compressed: bool
    ) -> tuple[Callable[[int], OccupiedPages], Callable[[int, Tensor], Tensor]]:
        """Entries lie in their blocks from the first that is not freed; and so they will afterwards, in any layer."""
        schedule, size, kv_heads = self._schedule, self._schedule.block_size, self._schedule.kv_heads
        heads = torch.arange(kv_heads, device=rows.device)[:, None]
        after = batch.tensor([request.after for request in requests])

        def subpages(entries: int) -> Tensor:
            first = (after - entries)[:, None] // size
            columns = first + torch.arange(-(-entries // size), device=rows.device)
            return batch.block_table[rows[:, None], columns].long()[:, None] * kv_heads + heads

        # Nothing was packed at events that dropped nothing: what came since the one before is whole.
        kept = torch.zeros_like(after)
        if compressed:
            points = [schedule.compressed(request.prompt, request.before) for request in requests]
            kept = batch.tensor(points) - (after - width)
        shape = (len(requests), kv_heads)
        entries = torch.full(shape, width, device=rows.device)
        occupied, now = OccupiedPages(subpages(width), kept[:, None].expand(shape), entries), subpages(left)
        return lambda _: occupied, lambda *_: now

    def _shift(self, batch: StepBatch, dropped: list[int]) -> ShiftedBatch:
        """The batch without what was dropped; moves new tokens' slots to where their requests' entries end."""
        table, size = batch.block_table, self._schedule.block_size
        if any(entries % size for entries in dropped):
            before = torch.zeros(len(dropped), dtype=torch.int64)
            for request in batch.requests:
                before[request.row] = request.before
            # On the host, which knows all of it, so that a GPU gets it at once.
            row, position = new_tokens(before, batch.query_start_loc.long())
            shift = (torch.tensor(dropped) % size)[row]
            row, place, moves = batch.upload(torch.stack((row, position - shift, shift > 0)))
            slots = batch.slot_mapping[: len(row)]
            moved = table[row, place // size].long() * size + place % size
            slots.copy_(torch.where(moves > 0, moved, slots))
        lost = batch.tensor(dropped)
        columns = torch.arange(table.shape[1], device=table.device) + (lost // size)[:, None]
        return ShiftedBatch(
            block_table=table.gather(1, columns.clamp(max=table.shape[1] - 1)),
            seq_lens=batch.seq_lens - lost.to(batch.seq_lens),
            max_seq_len=max(request.after - dropped[request.row] for request in batch.requests),
            dropped=dropped,
        )
