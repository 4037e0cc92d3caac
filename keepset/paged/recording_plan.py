"""Which of a step's queries are recorded or summed for later events, as lists of operations of layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.feature import Accumulators
from keepset.kernels.page_layout import EntriesInPages
from keepset.paged.eviction import EvictionSchedule
from keepset.paged.query_records import (
    AcceptedQueries,
    DraftedQueries,
    DraftedTokens,
    HeldQueries,
    LateCapture,
    PromptChunk,
    QueryAddition,
    QueryCapture,
    QueryRecord,
)
from keepset.paged.request_table import RequestTable
from keepset.paged.step import ScheduledRequest, StepBatch, StepPlan
from keepset.recording import Recording

LocateEntries = Callable[[StepBatch, Sequence[ScheduledRequest]], Callable[[], EntriesInPages]]
"""Return a function that says, once the step is planned, where these requests' entries lie before the step's events."""


@dataclass(frozen=True)
class _Waiting:
    """Queries of one request whose attention is summed.

    Attributes:
        request, record: the request and its record.
        begin, stop: positions of the queries, the end exclusive.
        point: tokens at the event that the sums are for.
        unwritten: how many of the newest entries of each head have no sum yet.
    """

    request: ScheduledRequest
    record: QueryRecord
    begin: int
    stop: int
    point: int
    unwritten: int

    @property
    def ends_prompt(self) -> bool:
        """Whether the event is the prompt's end."""
        return self.point == self.request.prompt


class StepRecording:
    """What a step records and sums, as host numbers until all its requests are planned.

    Attributes:
        chunks: tokens of prompts that are collected completely.
    """

    def __init__(self, batch: StepBatch, recording: Recording, entries: LocateEntries) -> None:
        self._batch, self._recording, self._entries = batch, recording, entries
        self.chunks: list[PromptChunk] = []
        # Queries of the step before and of this one that are summed, and those that are held back for the next step.
        self._taken_up: list[QueryAddition] = []
        self._added: list[QueryAddition] = []
        self._held: list[HeldQueries] = []
        # Queries that are recorded before the events and after them: number in the step, slot, place in the slot.
        self._early: list[tuple[int, int, int]] = []
        self._late: list[tuple[int, int, int]] = []
        # Queries of drafts of the step before that were accepted, with the copies that hold them; and queries of this
        # step of which some may be taken back.
        self._accepted: defaultdict[DraftedQueries, list[tuple[int, int, int]]] = defaultdict(list)
        self._drafted: list[tuple[QueryRecord, ScheduledRequest]] = []
        # Queries in rings that are summed, before and after this step's queries are recorded.
        self._flushed: list[_Waiting] = []
        self._ringed: list[_Waiting] = []
        # Queries in rings that could still wait.
        self._patient: list[tuple[ScheduledRequest, QueryRecord, int, int]] = []

    def accept(self, request: ScheduledRequest, record: QueryRecord, begins: int) -> None:
        """Plan to record the accepted ones of the tokens that were drafted for the step before.

        Args:
            request: the request.
            record: its record, with drafted tokens.
            begins: position of the first query that is recorded.
        """
        drafted, size = record.drafted, self._recording.size
        assert drafted is not None
        for position in range(max(drafted.positions.start, begins, request.before - size), request.before):
            index = drafted.first + position - drafted.positions.start
            self._accepted[drafted.queries].append((index, record.slot, position % size))
        record.drafted = None

    def draft(self, request: ScheduledRequest, record: QueryRecord, point: int) -> None:
        """Plan a step of which some tokens may be taken back: its queries are recorded in the next step.

        Args:
            request: the request.
            record: what is recorded of it.
            point: tokens at the event whose window these tokens are in.
        """
        self._drafted.append((record, request))
        self.window(request, record, point, request.before, request.before, request.before)

    def window(
        self, request: ScheduledRequest, record: QueryRecord, point: int, first: int, stop: int, begins: int
    ) -> None:
        """Plan the step's tokens in the window of one event of a request.

        Args:
            request: the request.
            record: what is recorded of it.
            point: tokens at the event.
            first: position of the first of these tokens.
            stop: position after the last of them.
            begins: position at which the window begins.
        """
        recording, room, behind = self._recording, self._recording.room, first > request.before
        offset = request.first_query - request.before
        record.aim(point, max(0, point - recording.summed(point == request.prompt)))
        begin, number = record.added, stop - record.added
        if number > room and behind:
            # The event moves entries before these queries can be summed, so they are held back for the next step.
            self._held.append(HeldQueries(record.slot, offset + begin, offset + stop))
            record.held = number
        elif number > room:
            if begin < first:
                waiting = self._taken(request, record, begin, first)
                if record.held:
                    self._taken_up.append(self._additions([waiting], first - begin, held=record.slot))
                    record.held = 0
                else:
                    self._flushed.append(waiting)
            if stop > first:  # else all of this step may be taken back
                new = self._taken(request, record, max(begin, first), stop)
                self._added.append(self._additions([new], stop - new.begin, first_query=offset + new.begin))
        elif number > 0 and not behind:
            if number >= recording.waiting or stop == point:
                self._ringed.append(self._taken(request, record, begin, stop))
            else:
                self._patient.append((request, record, begin, stop))
        positions = range(max(first, begins, stop - recording.size), stop)
        queries = self._late if behind else self._early
        queries += [(offset + position, record.slot, position % recording.size) for position in positions]

    def capture(self, request: ScheduledRequest, record: QueryRecord, point: int) -> None:
        """Plan to record the step's newest queries, whatever they will be looked at for.

        Args:
            request: the request.
            record: what is recorded of it.
            point: tokens at the last event that follows the step; 0 if none does. It looks at the queries before.
        """
        size, offset = self._recording.size, request.first_query - request.before
        for position in range(max(request.before, request.after - size), request.after):
            queries = self._late if point and position >= point else self._early
            queries.append((offset + position, record.slot, position % size))

    def finish(self, plan: StepPlan) -> None:
        """Fill the plan's lists of operations, in the order in which they run."""
        if self._ringed:  # If some must be summed, all are; from then on they are due in the same steps.
            self._ringed += [self._taken(*pending) for pending in self._patient]
        late = [LateCapture(capture) for capture in self._captures(self._late)]
        plan.in_layers = [
            *(
                AcceptedQueries(of, QueryCapture(*self._batch.tensor(where).unbind(1)))
                for of, where in self._accepted.items()
            ),
            *self.chunks,
            *self._taken_up,
            *self._from_rings(self._flushed),
            *self._added,
            *self._held,
            *self._captures(self._early),
            *late,
            *self._copied_drafts(),
        ]
        plan.before_events = [*self._from_rings(self._ringed)]
        plan.after_events = [*late]

    def _taken(self, request: ScheduledRequest, record: QueryRecord, begin: int, stop: int) -> _Waiting:
        """Return queries that are summed from now on; after that, all entries have a sum.

        Args:
            request: the request.
            record: what is recorded of it; all queries before `stop` count as summed from now on.
            begin: position of the first query.
            stop: position after the last query.
        """
        # Entries of rejected drafts have no sum, or zero, which is also right for the entries that replace them.
        unwritten = max(request.after - record.written, 0)
        waiting = _Waiting(request, record, begin, stop, record.point, unwritten)
        record.added, record.written = stop, request.after
        return waiting

    def _from_rings(self, waiting: list[_Waiting]) -> list[QueryAddition]:
        """Return additions of queries in rings: one for requests at their prompt's end, one for the others."""
        groups: defaultdict[bool, list[_Waiting]] = defaultdict(list)
        for pending in waiting:
            groups[pending.ends_prompt].append(pending)
        return [self._additions(group, self._recording.room) for group in groups.values()]

    def _additions(self, waiting: list[_Waiting], number: int, **source: int) -> QueryAddition:
        """Return the addition for the `number` queries before each `stop`; those before `begin` do not count.

        Args:
            waiting: queries of one or more requests; all of these are at their prompt's end, or none.
            number: queries per request.
            **source: where the queries are if not in the rings, as `QueryAddition` names it.
        """
        numbers = [
            (pending.record.slot, pending.begin, pending.stop, pending.point, pending.request.after, pending.unwritten)
            for pending in waiting
        ]
        slots, begins, stops, points, lengths, unwritten = self._batch.tensor(numbers).t().contiguous().unbind()
        positions = stops[:, None] + torch.arange(-number, 0, device=stops.device)
        owners = [(pending.record.slot, pending.request.after) if pending.record.own else None for pending in waiting]
        return QueryAddition(
            slots,
            positions,
            begins,
            points,
            waiting[0].ends_prompt,
            lengths,
            unwritten,
            owners if any(owners) else (),
            self._entries(self._batch, [pending.request for pending in waiting]),
            **source,
        )

    def _copied_drafts(self) -> list[DraftedQueries]:
        """Return the operation that copies the queries of drafts, if there are any."""
        if not self._drafted:
            return []
        index = [query for _, request in self._drafted for query in range(request.first_query, request.end_query)]
        drafted, first = DraftedQueries(self._batch.tensor(index)), 0
        for record, request in self._drafted:
            record.drafted = DraftedTokens(drafted, first, range(request.before, request.after))
            first += request.after - request.before
        return [drafted]

    def _captures(self, captures: list[tuple[int, int, int]]) -> list[QueryCapture]:
        """Return the operation that records queries, if there are any."""
        return [QueryCapture(*self._batch.tensor(captures).unbind(1))] if captures else []


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

    Attributes:
        records_all: whether every query is recorded, because each may be a turn's last.
    """

    def __init__(self, schedule: EvictionSchedule, recording: Recording, layers: int, table: RequestTable) -> None:
        self._schedule, self._recording, self._layers = schedule, recording, layers
        recipe = schedule.recipe
        self._needs = recipe.method.traits.needs
        self._turns = recipe.schedule.turns
        self._collects = schedule.whole_prompt and recipe.schedule.prefill
        self._records = bool(recording) or self._collects
        self.records_all = self._turns and self._records
        self._table = table
        self._by_row: dict[int, QueryRecord] = {}
        self._ended: list[QueryRecord] = []
        self._slots: np.ndarray | None = None  # of the requests' records, once steps decode one more token of each

    def quiet_until(self, prompt: int, before: int, event: int) -> int:
        """Return up to how many tokens a step may lead a request so that nothing of it is recorded.

        Args:
            prompt: tokens of its prompt.
            before: its tokens before the step.
            event: tokens at its next event, which the step does not reach either.
        """
        if not self._records:
            return event - 1
        if self._collects and before < prompt:
            return 0  # every chunk of a prompt is collected
        return min(event - 1, self._begins(prompt, event))

    def go_on(self, batch: StepBatch, plan: StepPlan) -> None:
        """Add to a plan what is recorded in a step that decodes one more token of each request of the step before.

        Args:
            batch: the step. Nothing is due after it.
            plan: its plan.
        """
        if self.records_all:
            rows = batch.rows
            if self._slots is None:
                self._slots = np.array([self._by_row[row].slot for row in rows.row.tolist()], dtype=np.int64)
            captured = np.stack((rows.first_query, self._slots, rows.before % self._recording.size))
            plan.in_layers = [QueryCapture(*batch.tensor(captured).unbind())]
        self._table.advance(batch, self.records_all)

    def plan(
        self, batch: StepBatch, active: Sequence[ScheduledRequest], plan: StepPlan, entries: LocateEntries
    ) -> None:
        """Add to a step's plan the queries and prompts that later events look at.

        Args:
            batch: the step.
            active: those of its requests that may be recorded.
            plan: its plan.
            entries: says where entries lie.
        """
        if not self._records:
            return
        if self._ended:
            self._table.close_records(self._ended)  # their events have been executed by now
        self._by_row, self._ended, self._slots = {}, [], None
        if active:
            self._record(batch, active, plan, entries)

    def _record(
        self, batch: StepBatch, active: Sequence[ScheduledRequest], plan: StepPlan, entries: LocateEntries
    ) -> None:
        recorded = [(request, self._windows(request)) for request in active]
        recorded = [
            (request, windows) for request, windows in recorded if windows or self._turns or self._is_collected(request)
        ]
        starts = {
            request.row: max(request.before, windows[0].begins if windows else 0) for request, windows in recorded
        }
        leading = {request.row: pages for request, _ in recorded if (pages := self._may_share(request))}
        step = StepRecording(batch, self._recording, entries)
        records, opening = self._table.records(batch, [request for request, _ in recorded], starts, leading)
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
            past = max((point for point, _ in windows if point <= request.after), default=0)
            if self._turns:
                step.capture(request, record, past)
            elif windows and windows[-1].point <= request.after:
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

        Args:
            request: the request in the step.
            windows: the windows that its tokens are in, the first event's first.
        """
        new = request.after - request.before
        reaches_event = windows[0].point <= request.after
        return not reaches_event and 1 < new <= 1 + self._recording.drafts and request.after > request.prompt

    def _note_shared(self, request: ScheduledRequest, record: QueryRecord, opening: dict[int, list[int]]) -> None:
        """Note which pages of a request others may share; `opening` has them for requests whose first window opens.

        Args:
            request: the request in the step.
            record: what is recorded of it; its `shares` and `own` are set.
            opening: the pages, by the row of the request.
        """
        if request.own is not None or not self._schedule.shares(request.prompt, request.before):
            record.shares, record.own = (), False
        elif request.row in opening:
            record.shares = opening[request.row]
            record.own = self._shares_pages(record)

    def _shares_pages(self, record: QueryRecord) -> bool:
        """Return whether another request with sums in its pages' slots shares a page of this request."""
        records = (open_record for open_record in self._table.open_records() if open_record is not record)
        candidates = (open_record for open_record in records if open_record.point and not open_record.own)
        # Requests with a common prefix have equal pages at the same places.
        shared = (zip(record.shares, candidate.shares) for candidate in candidates)  # noqa: B905
        return any(page == other_page for pairs in shared for page, other_page in pairs)

    def _may_share(self, request: ScheduledRequest) -> int:
        """Return how many leading pages of a request others may share; 0 unless its first window opens now."""
        prompt, before = request.prompt, request.before
        event = self._schedule.upcoming(prompt, before)
        unshared = request.own is not None or not self._schedule.shares(prompt, before)
        if event is None or unshared or self._begins(prompt, event) < before:
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

    def of_ended(self, page: int, tokens: int, entries: EntriesInPages) -> tuple[QueryRecord, QueryAddition]:
        """Return the record of a turn that has ended, and the operation that sums its queries, those of this turn.

        Args:
            page: the page that holds the request's newest token.
            tokens: tokens of the request.
            entries: where its entries lie.

        Raises:
            RuntimeError: its queries are not known any more.
        """
        record = self._table.record_at(page, tokens)
        if record is None:
            raise RuntimeError("keepset lost the queries of a turn that has ended.")
        device = entries.lengths.device
        slots, begins, lengths = (
            torch.tensor([number], dtype=torch.long, device=device)
            for number in (record.slot, max(record.start, tokens - self._recording.summed()), tokens)
        )
        positions = torch.arange(tokens - self._recording.room, tokens, device=device)[None]
        addition = QueryAddition(slots, positions, begins, lengths, False, lengths, lengths, (), lambda: entries)
        return record, addition

    def _begins(self, prompt: int, point: int) -> int:
        """Return the position of the first query that is recorded for an event.

        Args:
            prompt: tokens of the request's prompt.
            point: tokens of the request at the event.
        """
        return max(0, point - self._recording.reach(ends_prompt=point == prompt))

    def _chunk(self, request: ScheduledRequest, record: QueryRecord, blocks: Int[Tensor, " width"]) -> PromptChunk:
        """Return the tokens of a prompt that this step brings, to be collected.

        Args:
            request: the request in the step.
            record: what is recorded of it.
            blocks: its blocks, by logical position.
        """
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
