"""Heads that keep different numbers of entries: each (request, head) has a page table of its own."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from keepset.kernels.subpages import Layout
from keepset.paged.capture import CapturePlanner
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.page_tables import FreedBlocks, PerHeadTables
from keepset.paged.per_head import PerHeadSequences
from keepset.paged.step import ScheduledRequest, StepBatch, StepPlan


class RaggedPlanner:
    """Tables, slots and events of a step."""

    def __init__(
        self, schedule: EvictionSchedule, layers: int, blocks: int, freed_blocks: FreedBlocks, capture: CapturePlanner
    ) -> None:
        self._schedule, self._freed_blocks, self._capture = schedule, freed_blocks, capture
        self._tables = PerHeadTables(layers, schedule.kv_heads, schedule.block_size, blocks)

    def begin(self, page: int, layout: Layout) -> None:
        """A request has this layout, and its newest token in this page."""
        self._tables.file(page, layout)

    def plan(self, batch: StepBatch, plan: StepPlan) -> None:
        """Adds to the step's plan the heads' tables and what is compressed."""
        schedule, requests = self._schedule, batch.requests
        compressed = [
            request.after_context or schedule.was_compressed(request.prompt, request.before) for request in requests
        ]
        groups: defaultdict[tuple[int, int, int, bool], list[ScheduledRequest]] = defaultdict(list)
        for request, before in zip(requests, compressed, strict=True):
            if at := schedule.due(request.prompt, request.before, request.after):
                groups[request.after, at, request.prompt, before].append(request)
        step = self._tables.advance(
            batch.block_table[: len(requests)],
            batch.tensor([request.before for request in requests]),
            batch.tensor([request.after for request in requests]),
            batch.upload(batch.query_start_loc[: len(requests) + 1].long()),
            compressed,
            bool(groups),
            all(request.end_query - request.first_query == 1 for request in requests),
        )
        if step is not None and step.slots is not None:
            tokens = int(batch.query_start_loc[-1])
            plan.per_head = PerHeadSequences(step, tokens, batch.max_query_len, schedule.block_size)
        for (after, at, prompt, before), members in groups.items():
            rows, first, keep = batch.tensor([request.row for request in members]), None, None
            if schedule.fixed:
                first = batch.tensor([schedule.freed(prompt, after)] * len(members))
                keep = at - schedule.dropped(prompt, after)
            elif step is not None:
                for request in members:
                    self._freed_blocks.add(self._tables, int(step.pages[request.row]))
            # The engine's table may change before the event: what there is of it now is the event's own.
            blocks = batch.block_table[rows]
            pages = partial(self._tables.occupied, rows), partial(self._tables.reassign, rows, blocks, first)
            plan.events.append(self._capture.event(batch, rows, members, after - at, after, keep, before, *pages))
