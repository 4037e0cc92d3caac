"""`StepRecording`: what a step of a group of layers records and adds up, as lists of operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from keepset.kernels.paged_arguments import EntriesInPages
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
from keepset.paged.step import ScheduledRequest, StepBatch, StepPlan
from keepset.recording.features import Recording

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
        places = range(max(first, begins, stop - recording.size), stop)
        queries = self._late if behind else self._early
        queries += [(offset + position, record.slot, position % recording.size) for position in places]

    def finish(self, plan: StepPlan) -> None:
        """Fill the plan's lists of operations, in the order in which they run."""
        if self._ringed:  # If some must be summed, all are; from then on they are due in the same steps.
            self._ringed += [self._taken(*one) for one in self._patient]
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
        """Return queries that are summed from now on; after that, all entries have a sum."""
        # Entries of rejected drafts have no sum, or zero, which is also right for the entries that replace them.
        unwritten = max(request.after - record.written, 0)
        waiting = _Waiting(request, record, begin, stop, record.point, unwritten)
        record.added, record.written = stop, request.after
        return waiting

    def _from_rings(self, waiting: list[_Waiting]) -> list[QueryAddition]:
        """Return additions of queries in rings: one for requests at their prompt's end, one for the others."""
        groups: defaultdict[bool, list[_Waiting]] = defaultdict(list)
        for each in waiting:
            groups[each.ends_prompt].append(each)
        return [self._additions(group, self._recording.room) for group in groups.values()]

    def _additions(self, waiting: list[_Waiting], number: int, **source: int) -> QueryAddition:
        """Return the addition for the `number` queries before each `stop`; those before `begin` do not count."""
        numbers = [
            (one.record.slot, one.begin, one.stop, one.point, one.request.after, one.unwritten) for one in waiting
        ]
        slots, begins, stops, points, lengths, unwritten = self._batch.tensor(numbers).t().contiguous().unbind()
        positions = stops[:, None] + torch.arange(-number, 0, device=stops.device)
        owners = [(one.record.slot, one.request.after) if one.record.own else None for one in waiting]
        return QueryAddition(
            slots,
            positions,
            begins,
            points,
            waiting[0].ends_prompt,
            lengths,
            unwritten,
            owners if any(owners) else (),
            self._entries(self._batch, [one.request for one in waiting]),
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

    def _captures(self, places: list[tuple[int, int, int]]) -> list[QueryCapture]:
        """Return the operation that records queries, if there are any."""
        return [QueryCapture(*self._batch.tensor(places).unbind(1))] if places else []
