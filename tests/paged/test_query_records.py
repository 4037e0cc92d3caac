"""Recorded queries follow their requests, whatever row, page or company those have."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Recipe
from keepset.paged.passing import PassingQueries
from keepset.paged.query_records import Move, QueryRecord, QueryRecords, slots_for
from keepset.paged.recording import Recording
from keepset.paged.step import QueryCapture
from tests.paged.methods import Loud
from tests.tiers import examples

WINDOW, BLOCK = 6, 4
RECORDING = Recording.of(Recipe.of(Loud(window=WINDOW), keep=10), 1, 1, 4)


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
        self.records = QueryRecords(running)
        self.passing = PassingQueries(RECORDING, 1, slots_for(running), 1, 1, torch.float32)
        self.running: list[Request] = []
        self.free = list(range(200))
        self.numbers = 0

    def add(self) -> None:
        self.running.append(Request(self.numbers))
        self.numbers += 1

    def drop(self, index: int) -> None:
        request = self.running.pop(index)
        self.free += request.pages

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
            page_before = request.pages[-1] if before else 0
            while len(request.pages) * BLOCK < after:
                request.pages.append(self.free.pop())
            request.length = after
            if after % 10 in quiet:
                request.since = -1
                continue
            moves.append(Move(page_before, request.pages[-1], 7, before, after, max(before, after - WINDOW)))
            who.append(request)
        slots, records = set(), self.records.follow(moves)
        for request, move, record in zip(who, moves, records, strict=True):
            slots.add(record.slot)
            request.since = move.start if request.since < 0 else request.since
            assert record.start == request.since and record.length == move.after
            positions = torch.arange(move.start, move.after)
            capture = QueryCapture(positions - move.start, torch.full_like(positions, record.slot), positions % WINDOW)
            queries = torch.stack([request.query(int(p)) for p in positions])
            self.passing.record(range(1), queries[None], capture)
            newest = torch.arange(move.after - WINDOW, move.after)
            read = self.passing.newest(range(1), torch.tensor([record.slot]), newest[None])[0, 0]
            for place, position in enumerate(newest.tolist()):
                if position < 0:
                    assert not read[place].any()
                elif position >= request.since:
                    assert torch.equal(read[place], request.query(position)[0])
        assert len(slots) == len(moves)


@examples(150)
@given(st.data(), st.integers(1, 4))
def test_records_follow_requests(data: st.DataObject, most: int) -> None:
    pool, quiet = Pool(most), data.draw(st.frozensets(st.integers(0, 9), max_size=3), label="not recorded")
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


def one(records: QueryRecords, *move: int) -> QueryRecord:
    (record,) = records.follow([Move(*move)])
    return record


def test_a_record_of_another_length_or_prompt_is_not_taken() -> None:
    records = QueryRecords(3)
    first = one(records, 0, 7, 40, 0, 10, 0)
    assert one(records, 7, 7, 40, 10, 11, 10) is first
    # A request that begins behind the pages of another: that one's record stays its own, whichever comes first.
    other, same = records.follow([Move(7, 8, 41, 11, 12, 11), Move(7, 7, 40, 11, 12, 11)])
    assert same is first and other is not first and other.start == 11
    shorter = one(records, 7, 7, 40, 9, 10, 9)  # the page went to someone else, who is not as long
    assert shorter is not first and shorter.start == 9
    assert one(records, 7, 7, 40, 0, 10, 0) is not shorter  # one that begins has no past


def test_who_is_not_recorded_any_more_gives_the_slot_back() -> None:
    records, slots = QueryRecords(1), set()
    kept = one(records, 0, 1, 9, 0, 10, 0)
    for length in range(10, 20):
        ended = one(records, 0, 7, 9, 0, length, 0)
        slots.add(ended.slot)
        records.free([ended])
        records.free([ended])  # whose page may be another's by now
    assert len(slots) == 1 and one(records, 1, 1, 9, 10, 11, 10) is kept
