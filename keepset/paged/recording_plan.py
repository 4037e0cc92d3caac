"""`RecordingPlanner`: plans which of a step's queries are recorded or summed for later events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.feature import Accumulators
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.query_records import PromptChunk, QueryRecord
from keepset.paged.request_table import RequestTable
from keepset.paged.step import ScheduledRequest, StepBatch, StepPlan
from keepset.paged.step_recording import LocateEntries, StepRecording
from keepset.recording.features import Recording


class _Window(NamedTuple):
    """The queries that one event looks at.

    Attributes:
        point: tokens at the event.
        begins: position of the first query.
    """

    point: int
    begins: int


class RecordingPlanner:
    """Plans which queries the layers of a group record.

    Args:
        schedule: when the requests are compressed.
        recording: what is recorded of queries for that.
        layers: the number of layers.
        table: the states of the requests.
    """

    def __init__(self, schedule: EvictionSchedule, recording: Recording, layers: int, table: RequestTable) -> None:
        self._schedule, self._recording, self._layers = schedule, recording, layers
        recipe = schedule.recipe
        self._needs = recipe.method.traits.needs
        self._collects = schedule.whole_prompt and recipe.schedule.prefill
        self._records = bool(recording) or self._collects
        self._table = table
        self._by_row: dict[int, QueryRecord] = {}
        self._ended: list[QueryRecord] = []

    def plan(self, batch: StepBatch, plan: StepPlan, entries: LocateEntries) -> None:
        """Add to a step's plan the queries and prompts that later events look at.

        Args:
            batch: the step.
            plan: its plan.
            entries: says where entries lie.
        """
        if not self._records:
            return
        recorded = [(request, self._windows(request)) for request in batch.requests]
        recorded = [(request, windows) for request, windows in recorded if windows or self._is_collected(request)]
        starts = {one.row: max(one.before, windows[0].begins if windows else 0) for one, windows in recorded}
        leading = {one.row: pages for one, _ in recorded if (pages := self._may_share(one))}
        self._table.close_records(self._ended)  # their events have been executed by now
        step, self._by_row, self._ended = StepRecording(batch, self._recording, entries), {}, []
        records, opening = self._table.records(batch, starts, leading)
        for (request, windows), record in zip(recorded, records, strict=True):
            self._by_row[request.row] = record
            self._note_shared(request, record, opening)
            if record.drafted is not None:
                step.accept(request, record, windows[0].begins if windows else 0)
            if windows and self._is_drafted(request, windows):
                step.draft(request, record, windows[0].point)
                continue
            first = request.before
            for point, begins in windows:
                stop = min(point, request.after)
                step.window(request, record, point, first, stop, begins)
                first = stop
            if windows and windows[-1].point <= request.after:
                self._ended.append(record)
            if self._collects and request.before < request.prompt:
                step.chunks.append(self._chunk(request, record, batch.block_table[request.row]))
        step.finish(plan)

    def _windows(self, request: ScheduledRequest) -> list[_Window]:
        """Return the windows of a step's tokens: that of its event, if there is one, and the next one, if it opens.

        The window of an event is returned even if no query is in it.
        """
        schedule, prompt, after = request.own or self._schedule, request.prompt, request.after
        points = schedule.due(prompt, request.before, after), schedule.upcoming(prompt, after)
        windows = []
        for point in points:
            if point and ((begins := self._begins(prompt, point)) < after or point <= after):
                windows.append(_Window(point, begins))
        return windows

    def _is_collected(self, request: ScheduledRequest) -> bool:
        """Return whether a request's prompt continues, and is collected for an event."""
        schedule, prompt, before = request.own or self._schedule, request.prompt, request.before
        return self._collects and before < prompt and schedule.upcoming(prompt, before) is not None

    def _is_drafted(self, request: ScheduledRequest, windows: Sequence[_Window]) -> bool:
        """Return whether some of a step's tokens may be taken back; tokens of prompts and of steps that end at events
        are not.
        """
        new = request.after - request.before
        reaches_event = windows[0].point <= request.after
        return not reaches_event and 1 < new <= 1 + self._recording.drafts and request.after > request.prompt

    def _note_shared(self, request: ScheduledRequest, record: QueryRecord, opening: dict[int, list[int]]) -> None:
        """Note which pages of a request others may share; `opening` has them for requests whose first window opens."""
        if request.own is not None or not self._schedule.shares(request.prompt, request.before):
            record.shares, record.own = (), False
        elif request.row in opening:
            record.shares = opening[request.row]
            record.own = self._shares_pages(record)

    def _shares_pages(self, record: QueryRecord) -> bool:
        """Return whether another request with sums in its pages' slots shares a page of this request."""
        records = (other for other in self._table.open_records() if other is not record)
        others = (other for other in records if other.point and not other.own)
        # Requests with a common prefix have equal pages at the same places.
        return any(mine == theirs for other in others for mine, theirs in zip(record.shares, other.shares))  # noqa: B905

    def _may_share(self, request: ScheduledRequest) -> int:
        """Return how many leading pages of a request others may share; 0 unless its first window opens now."""
        prompt, before = request.prompt, request.before
        event = self._schedule.upcoming(prompt, before)
        apart = request.own is not None or not self._schedule.shares(prompt, before)
        if event is None or apart or self._begins(prompt, event) < before:
            return 0
        untouched = self._schedule.untouched(prompt)
        return (prompt if untouched is None else untouched) // self._schedule.block_size

    def recorded(self, requests: Sequence[ScheduledRequest], points: Sequence[int]) -> list[QueryRecord]:
        """Return the records of requests that are compressed after the step that was planned last.

        Args:
            requests: the requests.
            points: tokens of each at the event.

        Raises:
            RuntimeError: queries are missing that the event looks at.
        """
        if not self._records:
            return []
        records = [self._by_row[request.row] for request in requests]
        for request, record, at in zip(requests, records, points, strict=True):
            # The first tokens may have come from another request's pages; then their queries were not computed.
            shared = 0 if request.own else self._schedule.shareable(request.prompt) or 0
            lost = record.start > max(self._begins(request.prompt, at), shared)
            unseen = self._collects and at == request.prompt and record.prompt_tokens < at
            if lost or unseen:
                raise RuntimeError("keepset lost the queries of a request that is to be compressed.")
        return records

    def _begins(self, prompt: int, point: int) -> int:
        """Return the position of the first query that is recorded for an event."""
        return max(0, point - self._recording.reach(ends_prompt=point == prompt))

    def _chunk(self, request: ScheduledRequest, record: QueryRecord, blocks: Int[Tensor, " width"]) -> PromptChunk:
        """Return the tokens of a prompt that this step brings, to be collected."""
        until = min(request.prompt, request.after)
        if not record.chunks:
            record.chunks = [Accumulators(self._needs) for _ in range(self._layers)]
        if record.prompt_tokens == request.before:
            record.prompt_tokens = until
        # A prompt is not compressed before its end, so its pages are the engine's own.
        blocks = blocks[: -(-until // self._schedule.block_size)].long()
        kv_heads = self._schedule.kv_heads
        subpages = blocks * kv_heads + torch.arange(kv_heads, device=blocks.device)[:, None]
        end_query = request.first_query + until - request.before
        return PromptChunk(record.chunks, request.first_query, end_query, request.before, subpages)
