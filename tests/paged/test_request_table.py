"""A request's state follows it, whatever row, page or company it has, and goes to nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Recipe
from keepset.kernels.page_layout import FiledLayouts, PageLayout
from keepset.paged.engine import EngineSize
from keepset.paged.eviction import EvictionSchedule, RequestPlan
from keepset.paged.layout_table import LayoutTable
from keepset.paged.query_records import QueryRecord, slots_for
from keepset.paged.request_table import RequestTable
from keepset.paged.step import ScheduledRequest, StepBatch
from keepset.recording import QueryRing, Recording
from tests.paged.methods import Loud
from tests.tiers import examples

WINDOW, SIZE, PROMPT = 6, 4, 7
RECORDING = Recording.of_recipe(Recipe.of(Loud(window=WINDOW), keep=10), 1, 1, 4)


def table_of(running: int = 8, drafts: int = 0) -> RequestTable:
    schedule = EvictionSchedule(Recipe.of(Loud(window=WINDOW), keep=10), 0, (0,), 1, 8, SIZE)
    return RequestTable(schedule, EngineSize(running, 200, drafts))


def layouts_of(drafts: int = 0) -> LayoutTable:
    return LayoutTable(1, 2, SIZE, EngineSize(8, 200, drafts))


def batch_of(requests: Sequence[tuple[Sequence[int], int, int]], prompts: Sequence[int] = ()) -> StepBatch:
    """A step of requests with these pages, and tokens before and after it."""
    width = max(len(pages) for pages, _, _ in requests)
    table = torch.tensor([[*pages, *[0] * (width - len(pages))] for pages, _, _ in requests])
    nobody = torch.zeros(len(requests), dtype=torch.int64)
    lengths = prompts or [PROMPT] * len(requests)
    rows = [
        ScheduledRequest(row, 0, 1, prompt, before, after)
        for row, (prompt, (_, before, after)) in enumerate(zip(lengths, requests, strict=True))
    ]
    return StepBatch(rows, table, nobody, nobody, nobody, 1)


# --- overrides and layouts


def overridden(table: RequestTable, *requests: tuple[list[int], int, int]) -> list[bool]:
    """For each of a step's requests, whether it is the one that began after a context."""
    planned = table.with_plans(batch_of(requests)).requests
    return [request.own is not None and request.own.after_context for request in planned]


def test_overrides_follow_their_request_and_nobody_else() -> None:
    table = table_of()
    for page, name, tokens in ((7, "a", 0), (6, "b", 8), (9, "c", 8)):
        table.begin(page, tokens, name, RequestPlan(None, after_context=True))
    assert overridden(table, ([5], 0, 3), ([7, 8], 0, 6)) == [False, True]
    assert overridden(table, ([7, 8], 6, 8), ([5], 3, 4)) == [True, False]
    assert overridden(table, ([5, 12], 4, 5)) == [False]  # it rests
    assert overridden(table, ([7, 8, 2], 8, 9)) == [True]
    assert overridden(table, ([3, 6], 5, 6)) == [False]  # whose newest token is in the page of another
    assert overridden(table, ([3, 6, 1], 8, 9)) == [False]
    table.end({"a"})
    assert overridden(table, ([7, 8, 2], 9, 10), ([4, 9, 11], 8, 9)) == [False, True]


@pytest.mark.parametrize("taken_back", range(7))
def test_a_request_is_found_again_after_drafts_were_taken_back(taken_back: int) -> None:
    """Its newest tokens lie in three pages; in the last of them another request had as many tokens before it ended."""
    table, layouts, rows = table_of(drafts=6), layouts_of(6), FiledLayouts.empty(1, 1, 2, torch.device("cpu")).layout
    counts, length, zero = torch.tensor([[[3, 3]]]), torch.tensor([[7]]), torch.tensor([[0]])
    layouts.file(5, PageLayout(counts, length, zero, zero))
    for page, name, tokens in ((5, "own", 7), (7, "ended", 15 - taken_back)):
        table.begin(page, tokens, name, RequestPlan(None, after_context=name == "own"))
    pages = [4, 5, 6, 7]
    for before, after in (7, 14), (14 - taken_back, 15 - taken_back):
        assert overridden(table, (pages, before, after)) == [True]
        step = torch.tensor([pages]), torch.tensor([before]), torch.tensor([after]), torch.tensor([1])
        assert layouts.move(*step, rows).tolist() == [pages[(after - 1) // SIZE]]
        assert rows.counts.tolist() == counts.tolist()
    assert overridden(table, (pages, 7, 8)) == [False]  # who had fewer before


def test_who_was_not_compressed_has_no_layout_of_anothers() -> None:
    """A page that a prompt ran over keeps what was filed there; who begins behind it as a prefix must not find that."""
    layouts, rows = layouts_of(), FiledLayouts.empty(2, 1, 2, torch.device("cpu")).layout
    counts, length, zero = torch.tensor([[[3, 3]]]), torch.tensor([[8]]), torch.tensor([[0]])
    with pytest.raises(RuntimeError, match="lost the page tables"):
        layouts.at(7, 8)
    layouts.file(7, PageLayout(counts, length, zero, zero))
    before = torch.tensor([8, 8])
    layouts.move(torch.tensor([[3, 7, 2], [3, 7, 4]]), before, before + 1, torch.tensor([0, 1]), rows)
    assert rows.counts.tolist() == [[[0, 0]], [[3, 3]]]
    with pytest.raises(RuntimeError, match="lost the page tables"):
        layouts.at(4, 8)  # where it has 9 tokens
    assert layouts.at(4, 9).counts.tolist() == counts.tolist()
    with pytest.raises(RuntimeError, match="lost the page tables"):
        layouts.move(torch.tensor([[3, 5, 2]]), before[:1], before[:1] + 1, torch.tensor([1]), rows)


# --- records


@dataclass
class Request:
    """One request, and the pages that it holds."""

    number: int
    length: int = 0
    pages: list[int] = field(default_factory=list)
    since: int = -1  # the first position that is recorded without a gap

    def query(self, position: int) -> torch.Tensor:
        return torch.tensor([[1000.0 * self.number + position]])


class Pool:
    """Requests that come, get tokens and go; pages that went are given out again, the newest first."""

    def __init__(self, running: int) -> None:
        self.table = table_of(running)
        self.ring = QueryRing(RECORDING, 1, slots_for(running), 1, 1, torch.float32)
        self.running: list[Request] = []
        self.free = list(range(200))
        self.numbers = 0

    def add(self) -> None:
        self.running.append(Request(self.numbers))
        self.numbers += 1

    def drop(self, index: int) -> None:
        self.free += self.running.pop(index).pages

    def preempt(self, index: int) -> None:
        request = self.running[index]
        self.free += request.pages
        request.length, request.pages, request.since = 0, [], -1

    def step(self, order: list[int], tokens: list[int], quiet: frozenset[int] = frozenset()) -> None:
        """So many tokens for these; which are recorded follows from a request's length, as it does from prompts."""
        moves, who = [], []
        for index in order:
            request = self.running[index]
            before, after = request.length, request.length + tokens[index]
            while len(request.pages) * SIZE < after:
                request.pages.append(self.free.pop())
            request.length = after
            if after % 10 in quiet:
                request.since = -1
                continue
            moves.append((request.pages, before, after))
            who.append(request)
        starts = {row: max(before, after - WINDOW) for row, (_, before, after) in enumerate(moves)}
        slots, records = set(), recorded(self.table, moves, starts) if moves else []
        for request, start, record in zip(who, starts.values(), records, strict=True):
            after = request.length
            slots.add(record.slot)
            request.since = start if request.since < 0 else request.since
            assert record.start == request.since and record.length == after
            positions = torch.arange(start, after)
            queries = torch.stack([request.query(int(p)) for p in positions])
            slot = torch.full_like(positions, record.slot)
            self.ring.record(range(1), queries[None], slot, positions % WINDOW)
            newest = torch.arange(after - WINDOW, after)
            read = self.ring.newest(range(1), torch.tensor([record.slot]), newest[None])[0, 0]
            for place, position in enumerate(newest.tolist()):
                if position < 0:
                    assert not read[place].any()
                elif position >= request.since:
                    assert torch.equal(read[place], request.query(position)[0])
        assert len(slots) == len(moves)


def recorded(
    table: RequestTable, moves: Sequence[tuple[Sequence[int], int, int]], starts: dict[int, int], *prompts: int
) -> list[QueryRecord]:
    """The records of requests with these pages, and tokens before and after a step."""
    batch = table.with_plans(batch_of(moves, prompts))
    recorded = [request for request in batch.requests if request.row in starts]
    records, _ = table.records(batch, recorded, starts, {})
    return records


@examples(150)
@given(st.data(), st.integers(1, 4))
def test_records_follow_requests(data: st.DataObject, most: int) -> None:
    pool, quiet = Pool(most), data.draw(st.frozensets(st.integers(0, 9), max_size=3), label="not recorded")
    if data.draw(st.booleans(), label="others have overrides"):
        pool.table.begin(199, 1, "another", RequestPlan(None))
    for _ in range(data.draw(st.integers(1, 25), label="steps")):
        event = data.draw(st.sampled_from(["add", "drop", "replace", "preempt", "nothing"]))
        if pool.running and event in ("drop", "replace"):
            pool.drop(data.draw(st.integers(0, len(pool.running) - 1)))
        if event in ("add", "replace") and len(pool.running) < most:
            pool.add()
        if pool.running and event == "preempt":
            pool.preempt(data.draw(st.integers(0, len(pool.running) - 1)))
        count = len(pool.running)
        order = data.draw(st.permutations(range(count)))
        tokens = [data.draw(st.sampled_from([1, 1, 1, 2, 5, 9])) for _ in range(count)]
        pool.step(order, tokens, quiet)


def test_a_live_record_is_never_thrown_out_for_one_that_is_not() -> None:
    """All run to the end of a step; then most are gone, and their successors come first in the batch."""
    pool = Pool(4)
    for _ in range(4):
        pool.add()
    for _ in range(5):
        pool.step([3, 2, 1, 0], [3] * 4)
        for _ in range(3):
            pool.drop(1)
        pool.free.reverse()  # the successors get other pages
        for _ in range(3):
            pool.add()
    assert pool.running[0].since == 0 and pool.running[0].length == 15


def test_a_record_of_another_length_or_prompt_is_not_taken() -> None:
    table = table_of(3)
    (first,) = recorded(table, [([1, 2, 7], 0, 10)], {0: 0}, 40)
    assert recorded(table, [([1, 2, 7], 10, 12)], {0: 10}, 40) == [first]
    # A request that begins behind the pages of another: that one's record stays its own, whichever comes first.
    other, same = recorded(table, [([1, 2, 7, 8], 12, 13), ([1, 2, 7, 9], 12, 13)], {0: 12, 1: 12}, 41, 40)
    assert same is first and other is not first and other.start == 12
    (shorter,) = recorded(table, [([3, 4, 9], 9, 10)], {0: 9}, 40)  # the page went to someone else, who is not as long
    assert shorter is not first and shorter.start == 9
    (fresh,) = recorded(table, [([5, 6, 9], 0, 10)], {0: 0}, 40)  # a request that begins has no past
    assert fresh is not shorter


def test_who_is_not_recorded_any_more_gives_the_slot_back() -> None:
    table, slots = table_of(1), set()
    (kept,) = recorded(table, [([1, 2, 3], 0, 10)], {0: 0})
    for length in range(10, 13):
        (ended,) = recorded(table, [([5, 6, 7], 0, length)], {0: 0})
        slots.add(ended.slot)
        table.close_records([ended])
        table.close_records([ended])  # whose page may be another's by now
    assert len(slots) == 1 and recorded(table, [([1, 2, 3], 10, 11)], {0: 10}) == [kept]


def test_leading_pages_are_told_with_the_records() -> None:
    table = table_of()
    batch = table.with_plans(batch_of([([3, 4, 5], 0, 9), ([6], 0, 3), ([3, 7, 8], 0, 12)]))
    records, pages = table.records(batch, batch.requests[::2], {0: 0, 2: 0}, {0: 2, 2: 3})
    assert len(records) == 2 and pages == {0: [3, 4], 2: [3, 7, 8]}
