"""`CapturePlanner`: which of a step's queries are recorded or added up, because an event will look at them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.accumulators import Accumulators
from keepset.kernels.paged_arguments import EntriesInPages
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.page_tables import EventPages
from keepset.paged.query_records import Move, QueryRecord, QueryRecords
from keepset.paged.recording import Recording
from keepset.paged.step import (
    EvictionEvent,
    HeldQueries,
    PromptChunk,
    QueryAddition,
    QueryCapture,
    ScheduledRequest,
    StepBatch,
    StepPlan,
)
from keepset.recipe import Recipe

LocateEntries = Callable[[StepBatch, Sequence[ScheduledRequest]], Callable[[], EntriesInPages]]
"""Says where the layers have the entries of these requests before the step's events, once it is planned."""


@dataclass(frozen=True)
class _Waiting:
    """Queries of one request from `begin` to `stop` that are added up; `unwritten` entries have no number yet."""

    request: ScheduledRequest
    slot: int
    begin: int
    stop: int
    point: int
    unwritten: int
    own: bool

    @property
    def ends_prompt(self) -> bool:
        return self.point == self.request.prompt


class _Step:
    """What a step records and adds up, as numbers of the host until all requests are through."""

    def __init__(self, batch: StepBatch, plan: StepPlan, recording: Recording, entries: LocateEntries) -> None:
        self._batch, self._plan, self._recording, self._entries = batch, plan, recording, entries
        # Of each query its number, its request's slot and its place there, before and after events.
        self._early: list[tuple[int, int, int]] = []
        self._late: list[tuple[int, int, int]] = []
        # What is added up from the rings, before and after this step's queries are recorded.
        self._flushed: list[_Waiting] = []
        self._ringed: list[_Waiting] = []
        # What could still wait in its ring.
        self._patient: list[tuple[ScheduledRequest, QueryRecord, int, int]] = []

    def window(
        self, request: ScheduledRequest, record: QueryRecord, point: int, first: int, stop: int, begins: int
    ) -> None:
        """The step's tokens from `first` to `stop`, of the window before a point, which begins there."""
        recording, behind = self._recording, first > request.before
        offset = request.first_query - request.before
        record.aim(point, max(0, point - recording.summed(point == request.prompt)))
        begin, number = record.added, stop - record.added
        if number > recording.waiting and behind:
            # The event before them moves entries, so what these receive is added up in the next step.
            self._plan.held.append(HeldQueries(record.slot, offset + begin, offset + stop))
            record.held = number
        elif number > recording.waiting:
            if begin < first:
                waiting = self._taken(request, record, begin, first)
                if record.held:
                    self._plan.added_first.append(self._additions([waiting], first - begin, held=record.slot))
                    record.held = 0
                else:
                    self._flushed.append(waiting)
            new = self._taken(request, record, max(begin, first), stop)
            self._plan.added_now.append(self._additions([new], stop - new.begin, first_query=offset + new.begin))
        elif number > 0 and not behind:
            if number == recording.waiting or stop == point:
                self._ringed.append(self._taken(request, record, begin, stop))
            else:
                self._patient.append((request, record, begin, stop))
        places = range(max(first, begins, stop - recording.size), stop)
        queries = self._late if behind else self._early
        queries += [(offset + position, record.slot, position % recording.size) for position in places]

    def finish(self) -> None:
        """Completes the plan."""
        plan = self._plan
        if self._ringed:  # Where one must be added up, all are, and from then on they fall due in the same steps.
            self._ringed += [self._taken(*one) for one in self._patient]
        plan.captured_before, plan.captured_after = self._capture(self._early), self._capture(self._late)
        plan.added_first += self._from_rings(self._flushed)
        plan.added += self._from_rings(self._ringed)

    def _taken(self, request: ScheduledRequest, record: QueryRecord, begin: int, stop: int) -> _Waiting:
        """From now on these are added up, and all entries have a number."""
        waiting = _Waiting(request, record.slot, begin, stop, record.point, request.after - record.written, record.own)
        record.added, record.written = stop, request.after
        return waiting

    def _from_rings(self, waiting: list[_Waiting]) -> list[QueryAddition]:
        groups: defaultdict[bool, list[_Waiting]] = defaultdict(list)
        for each in waiting:
            groups[each.ends_prompt].append(each)
        return [self._additions(group, self._recording.waiting) for group in groups.values()]

    def _additions(self, waiting: list[_Waiting], number: int, **source: int) -> QueryAddition:
        """The newest so many queries before each `stop`; those before `begin` do not count."""
        numbers = [(one.slot, one.begin, one.stop, one.point, one.request.after, one.unwritten) for one in waiting]
        slots, begins, stops, points, lengths, unwritten = self._batch.tensor(numbers).t().contiguous().unbind()
        positions = stops[:, None] + torch.arange(-number, 0, device=stops.device)
        entries = self._entries(self._batch, [one.request for one in waiting])
        ends_prompt = waiting[0].ends_prompt
        owners = [(one.slot, one.request.after) if one.own else None for one in waiting]
        return QueryAddition(
            slots,
            positions,
            begins,
            points,
            ends_prompt,
            lengths,
            unwritten,
            owners if any(owners) else (),
            entries,
            **source,
        )

    def _capture(self, places: list[tuple[int, int, int]]) -> QueryCapture | None:
        return QueryCapture(*self._batch.tensor(places).unbind(1)) if places else None


class CapturePlanner:
    """Of a group of so many `layers`, which record as it is said; at most `max_requests` run at once."""

    def __init__(self, schedule: EvictionSchedule, recording: Recording, layers: int, max_requests: int) -> None:
        self._schedule, self._recording, self._layers = schedule, recording, layers
        recipe = schedule.recipe
        self._needs = recipe.method.needs
        self._collects = schedule.whole_prompt and recipe.schedule.prefill
        self._records = bool(recording) or self._collects
        self.records = QueryRecords(max_requests)
        self._by_row: dict[int, QueryRecord] = {}
        self._ended: list[QueryRecord] = []

    def plan(self, batch: StepBatch, plan: StepPlan, entries: LocateEntries) -> None:
        """Adds to the step's plan the queries and chunks that the next events will look at."""
        if not self._records:
            return
        windows = []
        for request in batch.requests:
            schedule = request.own or self._schedule
            prompt, before, after = request.prompt, request.before, request.after
            event, upcoming = schedule.due(prompt, before, after), schedule.upcoming(prompt, after)
            if upcoming is not None and self._begins(prompt, upcoming) >= after:
                upcoming = None
            if event or upcoming is not None:
                windows.append((request, event, upcoming, max(before, self._begins(prompt, event or upcoming or 0))))
            elif self._collects and before < prompt and schedule.upcoming(prompt, before) is not None:
                windows.append((request, event, upcoming, before))
        step, self._by_row = _Step(batch, plan, self._recording, entries), {}
        records, opening = self._follow(batch, [(request, start) for request, _, _, start in windows])
        for (request, event, upcoming, _), record in zip(windows, records, strict=True):
            prompt, before, after = request.prompt, request.before, request.after
            self._by_row[request.row] = record
            if request.own is not None or not self._schedule.shares(prompt, before):
                record.shares, record.own = (), False
            elif request.row in opening:
                record.shares = opening[request.row]
                record.own = self.records.share_pages(record)
            if event:
                step.window(request, record, event, before, event, self._begins(prompt, event))
            if upcoming is not None:
                step.window(request, record, upcoming, max(event, before), after, self._begins(prompt, upcoming))
            elif event:
                self._ended.append(record)
            if self._collects and before < prompt:
                plan.chunks.append(self._chunk(request, record, batch.block_table[request.row]))
        step.finish()

    def _follow(
        self, batch: StepBatch, recorded: list[tuple[ScheduledRequest, int]]
    ) -> tuple[list[QueryRecord], dict[int, list[int]]]:
        """The records of these requests; what is recorded begins at a position.

        Returns:
            Besides, by the rows of those whose first window opens, the pages that other requests may have, too.
        """
        self.records.free(self._ended)  # whose events have been executed by now
        self._ended = []
        if not recorded:
            return [], {}
        size, table = self._schedule.block_size, batch.block_table
        places = [(one.row, max(one.before - 1, 0) // size, (one.after - 1) // size) for one, _ in recorded]
        opening = {one.row: leading for one, _ in recorded if (leading := self._may_share(one))}
        row, old, new = batch.tensor(places).unbind(1)
        pages = torch.stack((table[row, old], table[row, new]), 1).flatten()
        if opening:
            width = max(opening.values())
            pages = torch.cat((pages, table[batch.tensor(list(opening)), :width].flatten()))
        known = pages.tolist()  # the one thing that the host does not know
        shared, first = {}, 2 * len(recorded)
        for row_number, number in opening.items():
            shared[row_number] = known[first : first + number]
            first += width
        moves = [
            Move(known[2 * i], known[2 * i + 1], request.prompt, request.before, request.after, start)
            for i, (request, start) in enumerate(recorded)
        ]
        return self.records.follow(moves), shared

    def _may_share(self, request: ScheduledRequest) -> int:
        """Leading pages of a request that others may have, too, where its first window opens in this step; else 0."""
        prompt, before = request.prompt, request.before
        event = self._schedule.upcoming(prompt, before)
        apart = request.own is not None or not self._schedule.shares(prompt, before)
        if event is None or apart or self._begins(prompt, event) < before:
            return 0
        untouched = self._schedule.untouched(prompt)
        return (prompt if untouched is None else untouched) // self._schedule.block_size

    def event(
        self,
        recipe: Recipe,
        batch: StepBatch,
        requests: list[ScheduledRequest],
        newer: int,
        keep: Sequence[int] | None,
        compressed: bool,
        pages: EventPages,
    ) -> EvictionEvent:
        """The compression of these requests, and what it looks at; the other arguments are as in `EvictionEvent`."""
        points = [request.after - newer for request in requests]
        records = self._recorded(requests, points)
        return EvictionEvent(
            recipe=recipe,
            rows=[request.row for request in requests],
            at=batch.tensor(points),
            earliest=min(points),
            latest=max(points),
            prompts=batch.tensor([request.prompt for request in requests]),
            newer=newer,
            keep=keep,
            compressed=compressed,
            ends_prompt=points[0] == requests[0].prompt,
            equal_heads=not self._schedule.ragged,
            pages=pages,
            records=records,
            slots=batch.tensor([record.slot for record in records]),
        )

    def _recorded(self, requests: list[ScheduledRequest], points: list[int]) -> list[QueryRecord]:
        if not self._records:
            return []
        records = [self._by_row[request.row] for request in requests]
        for request, record, at in zip(requests, records, points, strict=True):
            # First tokens may have come from another request's pages: then their queries were not seen.
            shared = 0 if request.own else self._schedule.shareable(request.prompt) or 0
            lost = record.start > max(self._begins(request.prompt, at), shared)
            unseen = self._collects and at == request.prompt and record.prompt_tokens < at
            if lost or unseen:
                raise RuntimeError("keepset lost the queries of a request that is to be compressed.")
        return records

    def _begins(self, prompt: int, point: int) -> int:
        """Position of the first query that the event at this point looks at, or that is added up for it."""
        return max(0, point - max(self._recording.newest, self._recording.summed(point == prompt)))

    def _chunk(self, request: ScheduledRequest, record: QueryRecord, blocks: Int[Tensor, " width"]) -> PromptChunk:
        until = min(request.prompt, request.after)
        if not record.chunks:
            record.chunks = [Accumulators(self._needs) for _ in range(self._layers)]
        if record.prompt_tokens == request.before:
            record.prompt_tokens = until
        # Nothing has compressed a prompt before its end.
        blocks = blocks[: -(-until // self._schedule.block_size)].long()
        kv_heads = self._schedule.kv_heads
        subpages = blocks * kv_heads + torch.arange(kv_heads, device=blocks.device)[:, None]
        end_query = request.first_query + until - request.before
        return PromptChunk(record.chunks, request.first_query, end_query, request.before, subpages)
