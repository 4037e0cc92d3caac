"""Heads that keep equally many entries: one block table serves all, shifted by what was dropped.

What an event leaves is packed into logical slots from `dropped // block_size` blocks on; the blocks before are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.paged.capture import CapturePlanner
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.page_tables import OccupiedPages
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
            pages = self._pages(batch, rows, requests, width, left)
            plan.events.append(
                self._capture.event(batch, rows, requests, newer, width, left - newer, compressed, *pages)
            )
        if any(dropped):
            plan.shifted = self._shift(batch, dropped)

    def _pages(
        self, batch: StepBatch, rows: Int[Tensor, " rows"], requests: list[ScheduledRequest], width: int, left: int
    ) -> tuple[Callable[[int], OccupiedPages], Callable[[int, Tensor], Tensor]]:
        """Entries lie in their blocks from the first that is not freed; and so they will afterwards, in any layer."""
        schedule, size, kv_heads = self._schedule, self._schedule.block_size, self._schedule.kv_heads
        heads = torch.arange(kv_heads, device=rows.device)[:, None]

        def subpages(dropped: list[int], entries: int) -> Tensor:
            first = batch.tensor(dropped)[:, None] // size
            columns = first + torch.arange(-(-entries // size), device=rows.device)
            return batch.block_table[rows[:, None], columns].long()[:, None] * kv_heads + heads

        gone = [schedule.dropped(request.prompt, request.before) for request in requests]
        # Nothing was packed at events that dropped nothing: what came since the one before is whole.
        kept = [
            schedule.compressed(request.prompt, request.before) - dropped if dropped else 0
            for request, dropped in zip(requests, gone, strict=True)
        ]
        shape = (len(requests), kv_heads)
        entries = torch.full(shape, width, device=rows.device)
        occupied = OccupiedPages(subpages(gone, width), batch.tensor(kept)[:, None].expand(shape), entries)
        after = subpages([schedule.dropped(request.prompt, request.after) for request in requests], left)
        return lambda _: occupied, lambda *_: after

    def _shift(self, batch: StepBatch, dropped: list[int]) -> ShiftedBatch:
        table, lost = batch.block_table, batch.tensor(dropped)
        self._shift_slots(batch, lost)
        columns = torch.arange(table.shape[1], device=table.device) + (lost // self._schedule.block_size)[:, None]
        return ShiftedBatch(
            block_table=table.gather(1, columns.clamp(max=table.shape[1] - 1)),
            seq_lens=batch.seq_lens - lost.to(batch.seq_lens),
            max_seq_len=max(request.after - dropped[request.row] for request in batch.requests),
            dropped=dropped,
        )

    def _shift_slots(self, batch: StepBatch, dropped: Int[Tensor, " rows"]) -> None:
        """Moves the new tokens' slots to where their requests' entries end."""
        size = self._schedule.block_size
        shift = dropped % size
        if not bool(shift.any()):
            return
        starts = batch.query_start_loc.long().to(shift.device)
        lengths = starts[1:] - starts[:-1]
        row = torch.repeat_interleave(torch.arange(lengths.shape[0], device=shift.device), lengths)
        place = (
            torch.arange(row.shape[0], device=shift.device)
            - starts[row]
            + (batch.seq_lens.long() - lengths - shift)[row]
        )
        moved = batch.block_table[row, place // size].long() * size + place % size
        slots = batch.slot_mapping
        slots[: row.shape[0]] = torch.where(shift[row] > 0, moved, slots[: row.shape[0]])
