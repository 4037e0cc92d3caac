"""`CapturePlanner`: which of a step's queries and prompts are recorded, because an event will look at them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.accumulator import Accumulators
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.page_tables import OccupiedPages
from keepset.paged.query_windows import QueryCapture, QueryRecord, QueryWindows
from keepset.paged.step import EvictionEvent, PromptChunk, ScheduledRequest, StepBatch, StepPlan
from keepset.recipe import Recipe


def records_queries(recipe: Recipe) -> bool:
    """Whether any queries of a step are noted for events to come."""
    needs = recipe.method.needs
    return bool(needs.window or needs.buffer or Accumulators(needs))


class CapturePlanner:
    """Of a group of so many `layers`; at most `max_requests` run at once."""

    def __init__(self, schedule: EvictionSchedule, layers: int, max_requests: int) -> None:
        self._schedule, self._layers = schedule, layers
        recipe = schedule.recipe
        self._needs = needs = recipe.method.needs
        self._collects = schedule.whole_prompt and recipe.schedule.prefill
        # What the moments of a decode-time event cover is recorded like a window.
        buffer = min(needs.buffer, recipe.schedule.every or 0)
        self._window = max(needs.window, buffer)
        self._records = bool(self._window) or self._collects
        self.windows = QueryWindows(layers, max(self._window, 1), max_requests)
        self._by_row: dict[int, QueryRecord] = {}

    def plan(self, batch: StepBatch, plan: StepPlan) -> None:
        """Adds to the step's plan the queries and chunks that the next events will look at."""
        if not self._records:
            return
        # Of each token its query, its request's slot in the windows, and its place there.
        early: list[tuple[int, int, int]] = []
        late: list[tuple[int, int, int]] = []
        self._by_row = {}
        schedule, pages, size = self._schedule, batch.block_table, self._schedule.block_size
        for request in batch.requests:
            event = schedule.due(request.prompt, request.before, request.after)
            upcoming = schedule.next_event(request.prompt, request.after)
            soon = upcoming is not None and upcoming - request.after < self._window
            collecting = self._collects and request.before < request.prompt
            page_before = int(pages[request.row, max(request.before - 1, 0) // size])
            page = int(pages[request.row, (request.after - 1) // size])
            if not (event or soon or collecting):
                self.windows.forget(page_before)
                self.windows.forget(page)  # another request's, that held this page before
                continue
            start = max(request.before, (event or request.after) - self._window)
            record = self.windows.follow(page_before, page, start, request.before, request.after)
            self._by_row[request.row] = record
            if event:
                early += self._places(request, record, start, event)
                start = max(event, request.after - self._window)
            if soon:
                (late if event else early).extend(self._places(request, record, start, request.after))
            if collecting:
                plan.chunks.append(self._chunk(request, record, pages[request.row]))
        plan.captured_before, plan.captured_after = _capture(batch, early), _capture(batch, late)

    def event(
        self,
        rows: Int[Tensor, " rows"],
        at: Int[Tensor, " rows"],
        prompts: Int[Tensor, " rows"],
        requests: list[ScheduledRequest],
        newer: int,
        width: int,
        keep: int | None,
        compressed: bool,
        occupied: Callable[[int], OccupiedPages],
        reassign: Callable[[int, Tensor], Tensor | None],
    ) -> EvictionEvent:
        """The compression of these requests, and what it looks at; the other arguments are as in `EvictionEvent`."""
        points = [request.after - newer for request in requests]
        records = self._recorded(requests, points)
        return EvictionEvent(
            rows=rows,
            at=at,
            earliest=min(points),
            prompts=prompts,
            newer=newer,
            width=width,
            keep=keep,
            compressed=compressed,
            ends_prompt=points[0] == requests[0].prompt,
            equal_heads=not self._schedule.ragged,
            occupied=occupied,
            reassign=reassign,
            records=records,
            slots=rows.new_tensor([record.slot for record in records]),
        )

    def _recorded(self, requests: list[ScheduledRequest], points: list[int]) -> list[QueryRecord]:
        if not self._records:
            return []
        records = [self._by_row[request.row] for request in requests]
        for request, record, at in zip(requests, records, points, strict=True):
            # First tokens may have come from another request's pages: then their queries were not seen.
            shared = self._schedule.shareable(request.prompt) or 0
            lost = self._window and record.start > max(at - self._window, 0) and record.start > shared
            unseen = self._collects and at == request.prompt and record.prompt_tokens < at
            if lost or unseen:
                raise RuntimeError("keepset lost the queries of a request that is to be compressed.")
        return records

    def _chunk(self, request: ScheduledRequest, record: QueryRecord, blocks: Int[Tensor, " width"]) -> PromptChunk:
        until = min(request.prompt, request.after)
        if not record.prompt:
            record.prompt = [Accumulators(self._needs) for _ in range(self._layers)]
        if record.prompt_tokens == request.before:
            record.prompt_tokens = until
        # Nothing has compressed a prompt before its end.
        blocks = blocks[: -(-until // self._schedule.block_size)].long()
        kv_heads = self._schedule.kv_heads
        subpages = blocks * kv_heads + torch.arange(kv_heads, device=blocks.device)[:, None]
        end_query = request.first_query + until - request.before
        return PromptChunk(record.prompt, request.first_query, end_query, request.before, subpages)

    def _places(
        self, request: ScheduledRequest, record: QueryRecord, start: int, stop: int
    ) -> list[tuple[int, int, int]]:
        if not self._window:
            return []
        offset = request.first_query - request.before
        return [(offset + position, record.slot, position % self._window) for position in range(start, stop)]


def _capture(batch: StepBatch, places: list[tuple[int, int, int]]) -> QueryCapture | None:
    return QueryCapture(*batch.tensor(places).unbind(1)) if places else None
