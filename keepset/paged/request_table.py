"""`RequestTable`: the state of each request, filed by the page that holds the request's newest token.

Attention layers get no request ids. But no other request may write to the page that holds a request's newest token. So
a request's state is filed under that page, and moved to the new one in every step. Reordering, aborts, preemption and
reused pages cannot confuse it. A request that ends leaves its state behind, which is forgotten when another request
writes to the page.

The table is on the host, which has to wait for the device to read page ids. So it reads only those of requests whose
state matters in the step. The layouts of heads of different lengths are on the device (`LayoutTable`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from keepset.kernels.dispatch import AsyncHostCopy
from keepset.paged.engine import EngineSize
from keepset.paged.eviction import EvictionSchedule, RequestPlan
from keepset.paged.query_records import QueryRecord, slots_for
from keepset.paged.step import ScheduledRequest, StepBatch


@dataclass
class RequestState:
    """Everything that the host knows about one request.

    Attributes:
        page: the page that holds its newest accepted token, or will hold its first.
        least, most: bounds of its tokens. If the newest are drafts, the next step says how many were accepted.
        prompt: tokens of its prompt, as the engine says; None before its first step.
        name: the engine's name of the request; None if it has no plan of its own.
        plan: how it is compressed, if not like all others.
        record: how far its queries are recorded.
    """

    page: int
    least: int
    most: int
    prompt: int | None = None
    name: str | None = None
    plan: RequestPlan | None = None
    record: QueryRecord | None = None


class RequestTable:
    """The states of the requests of one group of layers.

    Args:
        schedule: when the group's requests are compressed.
        size: numbers that the engine fixes when it starts.
    """

    def __init__(self, schedule: EvictionSchedule, size: EngineSize) -> None:
        self._schedule, self._block_size, self._drafts = schedule, schedule.block_size, size.drafts
        self._states: OrderedDict[int, RequestState] = OrderedDict()  # the most recently moved is last
        self._moved: dict[int, RequestState] = {}  # in this step, by row
        self._free_slots = list(reversed(range(slots_for(size.max_requests))))
        # Steps since, in which each request has decoded one token; whether these were recorded; and pages that requests
        # have come to in them, by row.
        self._ahead, self._captured = 0, False
        self._reached: list[tuple[list[int], AsyncHostCopy]] = []

    def begin(self, page: int, tokens: int, name: str, plan: RequestPlan) -> None:
        """File a request that begins.

        Args:
            page: the page that will hold its newest token.
            tokens: tokens that it has had.
            name: the engine's name of the request.
            plan: how it is compressed.
        """
        self._catch_up()
        self._forget(page)
        self._states[page] = RequestState(page, tokens, tokens, name=name, plan=plan)

    def end(self, names: Collection[str]) -> None:
        """Forget the requests of these names that have plans: they have ended, or start again."""
        self._catch_up()
        ended = [page for page, state in self._states.items() if state.name in names]
        for page in ended:
            self._forget(page)

    def newest(self, name: str) -> tuple[int, int]:
        """Return the page that holds the newest token of a request with a plan, and its tokens, as of the newest step.

        Args:
            name: the engine's name of the request.

        Raises:
            RuntimeError: the request is not known any more.
        """
        self._catch_up()
        for state in reversed(self._states.values()):
            if state.name == name:
                return state.page, state.most
        raise RuntimeError(f"keepset does not know request {name} any more.")

    def with_plans(self, batch: StepBatch) -> StepBatch:
        """Return the batch of a new step with the plans of its requests."""
        self._catch_up()
        self._moved = {}
        if not [state for state in self._states.values() if state.plan]:
            return batch
        self._move(batch, batch.requests)
        return replace(batch, requests=[self._with_plan(request) for request in batch.requests])

    def advance(self, batch: StepBatch, captured: bool) -> None:
        """Note a step in which each request of the step before decodes one token, in the same row.

        Nothing is looked up: where the requests have come to is needed only when other requests come.

        Args:
            batch: the step.
            captured: whether the queries of these tokens are recorded.
        """
        self._ahead, self._captured = self._ahead + 1, captured
        rows = batch.rows
        new_page = (rows.before % self._block_size == 0).nonzero()[0]
        if len(new_page) and self._moved:
            indices, columns = batch.tensor(np.stack((rows.row[new_page], rows.before[new_page] // self._block_size)))
            self._reached.append((rows.row[new_page].tolist(), AsyncHostCopy(batch.block_table[indices, columns])))

    def _catch_up(self) -> None:
        """File the states of requests by where they have come to."""
        if not self._ahead:
            return
        pages = {row: page for rows, copy in self._reached for row, page in zip(rows, copy.tolist(), strict=True)}
        filed = {row: state for row, state in self._moved.items() if self._states.get(state.page) is state}
        for state in filed.values():
            state.least, state.most = state.least + self._ahead, state.most + self._ahead
            if state.record is not None and self._captured:
                state.record.length += self._ahead
            del self._states[state.page]
        for row, state in filed.items():  # these were moved last, all of them
            if row in pages:
                state.page = pages[row]
                self._forget(state.page)
            self._states[state.page] = state
        self._ahead, self._reached = 0, []

    def _with_plan(self, request: ScheduledRequest) -> ScheduledRequest:
        plan = self._moved[request.row].plan
        if plan is None:
            return request
        prompt = request.prompt if plan.prompt is None else plan.prompt
        return replace(request, prompt=prompt, own=self._schedule.of_plan(plan))

    def records(
        self,
        batch: StepBatch,
        recorded: Sequence[ScheduledRequest],
        starts: Mapping[int, int],
        leading: Mapping[int, int],
    ) -> tuple[list[QueryRecord], dict[int, list[int]]]:
        """Return the records of some requests; a new record for those that have none.

        Args:
            batch: the step, as `with_plans` returned it.
            recorded: the requests.
            starts: for each request's row the position from which on it is recorded now.
            leading: for some of these rows, how many leading pages are asked for.

        Returns:
            The records, in the order of the requests, and the leading pages by row.
        """
        pages = self._move(batch, recorded, leading)
        records = []
        for request in recorded:
            state = self._moved[request.row]
            if state.record is not None and not state.record.goes_on_at(request.before):
                self._close(state)  # there is a gap
            if state.record is None:
                state.record = QueryRecord(self._new_slot(), starts[request.row], request.before)
            state.record.length = request.after
            self._states[state.page] = state
            records.append(state.record)
        return records, pages

    def close_records(self, records: Collection[QueryRecord]) -> None:
        """Forget records of requests that are not recorded any more. Their slots are free."""
        self._catch_up()
        ended = set(map(id, records))
        for page, state in list(self._states.items()):
            if id(state.record) in ended:
                self._close(state)
                if state.plan is None:
                    del self._states[page]

    def record_at(self, page: int, tokens: int) -> QueryRecord | None:
        """Return the record of a request that has ended; None if there is none.

        Args:
            page: the page that holds the request's newest token.
            tokens: tokens of the request.
        """
        self._catch_up()
        state = self._states.get(page)
        return state.record if state is not None and state.least <= tokens <= state.most else None

    def open_records(self) -> Iterator[QueryRecord]:
        """Yield all records."""
        self._catch_up()
        return (state.record for state in self._states.values() if state.record is not None)

    def _move(
        self, batch: StepBatch, requests: Sequence[ScheduledRequest], leading: Mapping[int, int] | None = None
    ) -> dict[int, list[int]]:
        """Move the states of requests to the pages of their newest tokens: the only host sync of a step's planning.

        States that were moved in this step already are left alone. A request without a state gets one, which is not
        filed.

        Args:
            batch: the step.
            requests: the requests whose states are moved.
            leading: how many leading pages are asked for, by row.

        Returns:
            The leading pages that were asked for, by row.
        """
        requests = [request for request in requests if request.row not in self._moved]
        old, new, leading_pages = self._read_pages(batch, requests, leading or {})
        # All states are claimed before any is forgotten.
        going_on = [self._claim(pages, request) for pages, request in zip(old, requests, strict=True)]
        for page in new:
            self._forget(page)
        for page, request, state in zip(new, requests, going_on, strict=True):
            least, most = self._least(request), request.after
            if state is None:
                self._moved[request.row] = RequestState(page, least, most, request.prompt)
                continue
            state.page, state.least, state.most, state.prompt = page, least, most, request.prompt
            self._states[page] = self._moved[request.row] = state
        return leading_pages

    def _least(self, request: ScheduledRequest) -> int:
        """Return how many tokens a request has at least after the step, whatever drafts are rejected."""
        is_prompt = request.after - request.before > 1 + self._drafts
        return request.after if is_prompt else request.before + 1

    def _read_pages(
        self, batch: StepBatch, requests: Sequence[ScheduledRequest], leading: Mapping[int, int]
    ) -> tuple[list[list[int]], list[int], dict[int, list[int]]]:
        """Return the pages where states may be filed, oldest first; the pages from now on; and leading pages by row.

        Args:
            batch: the step.
            requests: the requests whose states are moved.
            leading: how many leading pages are asked for, by row.
        """
        if not (requests or leading):
            return [], [], {}
        size, table, width = self._block_size, batch.block_table, max(leading.values(), default=0)
        # Every page that may hold the newest accepted token, and the page from now on.
        back = [min(tokens, self._drafts) for tokens in reversed(range(0, self._drafts + size, size))]
        newest = [(*(request.before - tokens for tokens in back), self._least(request)) for request in requests]
        columns = [[max(tokens - 1, 0) // size for tokens in counts] for counts in newest]
        pairs = [(request.row, *row_columns) for request, row_columns in zip(requests, columns, strict=True)]
        indices, count = batch.tensor(pairs), len(back) + 1
        indices = indices.view(-1, count + 1)
        pages = table[indices[:, :1], indices[:, 1:]].flatten()
        if leading:
            pages = torch.cat((pages, table[batch.tensor(list(leading)), :width].flatten()))
        numbers = pages.tolist()  # the one thing that the host does not know
        end = count * len(requests)
        newest_pages = [numbers[first : first + count] for first in range(0, end, count)]
        leading_pages = {
            row: numbers[end + index * width :][:number] for index, (row, number) in enumerate(leading.items())
        }
        return [pages[:-1] for pages in newest_pages], [pages[-1] for pages in newest_pages], leading_pages

    def _claim(self, pages: Sequence[int], request: ScheduledRequest) -> RequestState | None:
        for page in pages:
            state = self._states.get(page)
            # A request that begins behind another's pages may find that one's state there.
            is_own = state is not None and state.least <= request.before <= state.most
            if state is not None and is_own and state.prompt in (None, request.prompt):
                return self._states.pop(page)
        return None

    def _forget(self, page: int) -> None:
        if (state := self._states.pop(page, None)) is not None:
            self._close(state)

    def _close(self, state: RequestState) -> None:
        if state.record is not None:
            self._free_slots.append(state.record.slot)
            state.record = None

    def _new_slot(self) -> int:
        if not self._free_slots:  # take the slot of the least recently moved: more slots are open than requests run
            self._forget(next(page for page, state in self._states.items() if state.record is not None))
        return self._free_slots.pop()
