"""`RequestTable`: what is known of each request, filed by the page that holds the request's newest token.

Attention layers get no request ids. But no other request may write to the page that holds a request's newest token. So
a request's state is filed under that page, and moved to the new one in every step. Reordering, aborts, preemption and
reused pages cannot confuse it. A request that ends leaves its state behind, which is forgotten when another request
writes to the page.

There are two parts. The layouts of heads of different lengths are on the device and are moved there, without a host
sync. Everything else is on the host, which has to wait for the device to learn page ids. So it asks only for those of
requests whose state matters in the step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.kernels.dispatch import AsyncHostCopy
from keepset.kernels.page_layout import PageLayout
from keepset.kernels.paged import follow_layouts
from keepset.kernels.paged_arguments import FiledLayouts
from keepset.paged.engine import EngineSize
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.query_records import QueryRecord, slots_for
from keepset.paged.step import ScheduledRequest, StepBatch


@dataclass(frozen=True)
class RequestOverrides:
    """Facts of one request that replace those of the engine, or of its group of layers.

    Attributes:
        name: the engine's name of the request.
        after_context: whether it began with a context.
        own: when it is compressed, if not by the group's schedule.
        prompt: tokens that count as its prompt, if not those that the engine says.
    """

    name: str
    after_context: bool = False
    own: EvictionSchedule | None = None
    prompt: int | None = None


@dataclass
class RequestState:
    """Everything that the host knows of one request.

    Attributes:
        page: the page that holds its newest token that is not taken back, or is to hold its first.
        least, most: tokens that it has had. If the newest are drafts, it is known at the next step how many are left.
        prompt: tokens of its prompt, as the engine says; None before its first step.
        overrides: what holds for it instead.
        record: how far its queries are recorded.
    """

    page: int
    least: int
    most: int
    prompt: int | None = None
    overrides: RequestOverrides | None = None
    record: QueryRecord | None = None


class RequestTable:
    """The states of the requests of one group of layers.

    Args:
        layers, kv_heads: of the group, in this process.
        block_size: tokens per page.
        size: numbers that the engine fixes when it starts.
    """

    def __init__(self, layers: int, kv_heads: int, block_size: int, size: EngineSize) -> None:
        self._layers, self._kv_heads, self._block_size, self._blocks = layers, kv_heads, block_size, size.blocks
        self._drafts = size.drafts
        self._states: OrderedDict[int, RequestState] = OrderedDict()  # the most recently moved is last
        self._moved: dict[int, RequestState] = {}  # in this step, by row
        self._free_slots = list(reversed(range(slots_for(size.max_requests))))
        self._layouts: FiledLayouts | None = None
        self._lost = _LostFlag()

    # --- the host's part

    def begin(self, page: int, tokens: int, overrides: RequestOverrides) -> None:
        """File a request that begins.

        Args:
            page: the page that is to hold its newest token.
            tokens: tokens that it has had.
            overrides: what holds for it in place of what the engine says.
        """
        self._forget(page)
        self._states[page] = RequestState(page, tokens, tokens, overrides=overrides)

    def end(self, names: Collection[str]) -> None:
        """Forget the requests of these names that have overrides: they have ended, or start again."""
        ended = [page for page, state in self._states.items() if state.overrides and state.overrides.name in names]
        for page in ended:
            self._forget(page)

    def with_overrides(self, batch: StepBatch) -> StepBatch:
        """Return the batch of a new step with the overrides of its requests."""
        self._moved = {}
        if not any(state.overrides for state in self._states.values()):
            return batch
        self._move(batch, batch.requests)
        return replace(batch, requests=[self._with_overrides(request) for request in batch.requests])

    def _with_overrides(self, request: ScheduledRequest) -> ScheduledRequest:
        known = self._moved[request.row].overrides
        if known is None:
            return request
        prompt = request.prompt if known.prompt is None else known.prompt
        return replace(request, prompt=prompt, after_context=known.after_context, own=known.own)

    def records(
        self, batch: StepBatch, starts: Mapping[int, int], leading: Mapping[int, int]
    ) -> tuple[list[QueryRecord], dict[int, list[int]]]:
        """Return what is recorded of some requests; a new record for those that have none.

        Args:
            batch: the step, as `with_overrides` returned it.
            starts: for each request's row the position from which on it is recorded now.
            leading: for some of these rows a number of leading pages.

        Returns:
            The records, in the order of the batch, and the leading pages by row.
        """
        recorded = [request for request in batch.requests if request.row in starts]
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
        if not records:
            return
        ended = set(map(id, records))
        for page, state in list(self._states.items()):
            if id(state.record) in ended:
                self._close(state)
                if state.overrides is None:
                    del self._states[page]

    def open_records(self) -> Iterator[QueryRecord]:
        """Yield all records."""
        return (state.record for state in self._states.values() if state.record is not None)

    def _move(
        self, batch: StepBatch, requests: Sequence[ScheduledRequest], leading: Mapping[int, int] | None = None
    ) -> dict[int, list[int]]:
        """Move the states of requests to the pages of their newest tokens. The one host sync of a step's planning.

        Those of requests that were moved in this step already stay. A request without a state gets one, which is not
        filed.

        Returns:
            The leading pages that were asked for, by row.
        """
        requests = [request for request in requests if request.row not in self._moved]
        old, new, asked = self._read_pages(batch, requests, leading or {})
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
        return asked

    def _least(self, request: ScheduledRequest) -> int:
        """Return how many tokens a request has at least after the step, whatever is taken back."""
        is_prompt = request.after - request.before > 1 + self._drafts
        return request.after if is_prompt else request.before + 1

    def _read_pages(
        self, batch: StepBatch, requests: Sequence[ScheduledRequest], leading: Mapping[int, int]
    ) -> tuple[list[list[int]], list[int], dict[int, list[int]]]:
        """Return where requests' states may be filed, the oldest page first, where they are filed from now on, and
        leading pages by row.
        """
        if not (requests or leading):
            return [], [], {}
        size, table, width = self._block_size, batch.block_table, max(leading.values(), default=0)
        # Every page that may hold the newest token of those that were not taken back, and the page from now on.
        back = [min(tokens, self._drafts) for tokens in reversed(range(0, self._drafts + size, size))]
        newest = [(*(one.before - tokens for tokens in back), self._least(one)) for one in requests]
        columns = [[max(tokens - 1, 0) // size for tokens in each] for each in newest]
        places = batch.tensor([(one.row, *own) for one, own in zip(requests, columns, strict=True)])
        each = len(back) + 1
        places = places.view(-1, each + 1)
        pages = table[places[:, :1], places[:, 1:]].flatten()
        if leading:
            pages = torch.cat((pages, table[batch.tensor(list(leading)), :width].flatten()))
        known = pages.tolist()  # the one thing that the host does not know
        end = each * len(requests)
        own = [known[first : first + each] for first in range(0, end, each)]
        asked = {row: known[end + place * width :][:number] for place, (row, number) in enumerate(leading.items())}
        return [pages[:-1] for pages in own], [pages[-1] for pages in own], asked

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

    # --- the device's part

    def file_layout(self, page: int, layout: PageLayout) -> None:
        """File the layout of one request, once all events that are due are over.

        Args:
            page: the page that holds the request's newest token.
            layout: the layout, as its only row.
        """
        filed = self._layouts_on(layout.counts.device)
        for part, now in zip(filed.layout, layout, strict=True):
            part[page] = now[0].to(part)
        filed.tokens[page] = int(layout.length[0, 0])

    def move_layouts(
        self,
        block_table: Int[Tensor, "rows width"],
        before: Int[Tensor, " rows"],
        after: Int[Tensor, " rows"],
        required: Int[Tensor, " rows"],
        layout: PageLayout,
    ) -> Int[Tensor, " rows"]:
        """Move the layouts of a step's requests to the pages of their newest tokens, without a host sync.

        Args:
            block_table: the engine's block table.
            before: tokens of each request before the step.
            after: tokens of each request after the step.
            required: 1 for requests that must have a layout.
            layout: is filled with the layouts, row by row; with zeros for requests that have none and need none.

        Returns:
            The pages.

        Raises:
            RuntimeError: a request is not where it was left. A GPU says so some steps later, because waiting for it
                would take longer than the step's planning.
        """
        device = block_table.device
        filed, lost = self._layouts_on(device), self._lost.on(device)
        step = block_table, before, after, required
        pages = follow_layouts(filed, *step, lost, self._block_size, layout, self._drafts)
        self._lost.check()
        return pages

    def note_tokens(self, pages: Int[Tensor, " rows"], tokens: Int[Tensor, " rows"]) -> None:
        """Note how many tokens requests have, whose newest tokens are in the same pages as before.

        Args:
            pages: the pages.
            tokens: tokens of each request.
        """
        self.layouts.tokens[pages] = tokens.int()

    def layout_at(self, page: int, tokens: int) -> PageLayout:
        """Return the layout of a request, as its only row.

        Args:
            page: the page that holds the request's newest token.
            tokens: tokens of the request.

        Raises:
            RuntimeError: it is not known any more.
        """
        filed = self._layouts
        if filed is None or filed.tokens[page] != tokens:
            raise RuntimeError("keepset lost the page tables of a request that has ended.")
        return PageLayout(*(part[page][None].long() for part in filed.layout))

    def unused_blocks(self, pages: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
        """Return how many leading blocks no layer uses any more, of the requests with their newest tokens here."""
        return self.layouts.layout.first[pages].amin(1)

    @property
    def layouts(self) -> FiledLayouts:
        """The layouts of all requests, once a step was planned."""
        assert self._layouts is not None
        return self._layouts

    def _layouts_on(self, device: torch.device) -> FiledLayouts:
        if self._layouts is None:
            self._layouts = FiledLayouts.empty(self._blocks, self._layers, self._kv_heads, device)
        return self._layouts


class _LostFlag:
    """Set on the device once a request's layout was not where it must be; the host learns of it without waiting."""

    def __init__(self) -> None:
        self._device_flag: Int[Tensor, " 1"] | None = None
        self._host_flag: Int[Tensor, " 1"]

    def on(self, device: torch.device) -> Int[Tensor, " 1"]:
        """Return the device's flag."""
        if self._device_flag is None:
            self._device_flag = torch.zeros(1, dtype=torch.int32, device=device)
            self._host_flag = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        return self._device_flag

    def check(self) -> None:
        """Raise RuntimeError if the flag is known to be set; on a GPU that is what it was at the call before."""
        assert self._device_flag is not None
        if self._device_flag.device.type == "cpu":
            self._host_flag = self._device_flag
        if self._host_flag[0]:
            raise RuntimeError("keepset lost the page tables of a request that was compressed.")
        self._host_flag.copy_(self._device_flag, non_blocking=True)


RequestKey = tuple[str, int, int]
"""A request's id, how often it was preempted, and a group of layers."""


class EmptiedBlocks:
    """Counts of freed blocks, in a process that computes, for recipes whose counts depend on the data."""

    def __init__(self) -> None:
        self._events: list[tuple[RequestTable, Int[Tensor, " rows"], AsyncHostCopy]] = []
        self._keys: dict[int, RequestKey] = {}
        self._emptied: list[tuple[list[RequestKey | None], AsyncHostCopy]] = []

    def add(self, table: RequestTable, pages: Int[Tensor, " rows"]) -> None:
        """Note an event that follows the step which is planned.

        Args:
            table: has the requests.
            pages: the pages that hold the requests' newest tokens.
        """
        self._events.append((table, pages, AsyncHostCopy(pages)))

    def expect(self, keys: Mapping[int, RequestKey]) -> None:
        """Note whose newest tokens are in which pages; called between the plan of a step and that of the next.

        Args:
            keys: the requests, by the page of their newest token.
        """
        self._keys |= keys

    def settle(self) -> None:
        """Ask how many blocks the events have emptied, now that all of them are over."""
        for table, pages, copy in self._events:
            whose = [self._keys.get(page) for page in copy.tolist()]
            self._emptied.append((whose, AsyncHostCopy(table.unused_blocks(pages))))
        self._events, self._keys = [], {}

    def drain(self) -> dict[RequestKey, int]:
        """Return the leading blocks that are empty, of the requests whose events are over since the last call."""
        emptied, self._emptied = self._emptied, []
        numbers = [zip(whose, copy.tolist(), strict=True) for whose, copy in emptied]
        return {key: blocks for event in numbers for key, blocks in event if key is not None}
