"""Recorded queries follow their requests, whatever row, page or company those have."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset.paged.query_windows import QueryCapture, QueryWindows
from tests.tiers import examples

LAYERS, WINDOW, BLOCK = 2, 6, 4


@dataclass
class Request:
    """One request, and the pages that it holds."""

    number: int
    length: int = 0
    pages: list[int] = field(default_factory=list)
    since: int = -1  # the first position that is recorded without a gap

    def query(self, position: int, layer: int) -> torch.Tensor:
        return torch.tensor([[1000.0 * self.number + position, float(layer)]])


class Pool:
    """Requests that come, get tokens and go; pages that went are given out again, the newest first."""

    def __init__(self, running: int) -> None:
        self.windows = QueryWindows(LAYERS, WINDOW, running)
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

    def step(self, order: list[int], tokens: list[int], recorded: list[bool]) -> None:
        for index in order:
            request = self.running[index]
            before, after = request.length, request.length + tokens[index]
            page_before = request.pages[-1] if before else 0
            while len(request.pages) * BLOCK < after:
                request.pages.append(self.free.pop())
            request.length = after
            if not recorded[index]:
                self.windows.forget(page_before)
                self.windows.forget(request.pages[-1])
                request.since = -1
                continue
            start = max(before, after - WINDOW)
            record = self.windows.follow(page_before, request.pages[-1], start, before, after)
            request.since = start if request.since < 0 else request.since
            assert record.start == request.since and record.length == after
            positions = torch.arange(start, after)
            capture = QueryCapture(positions - start, torch.full_like(positions, record.slot), positions % WINDOW)
            for layer in range(LAYERS):
                queries = torch.stack([request.query(int(p), layer) for p in positions])
                self.windows.add(range(layer, layer + 1), queries[None], capture)
            newest = torch.arange(after - WINDOW, after)
            for layer in range(LAYERS):
                read = self.windows.read(range(layer, layer + 1), torch.tensor([record.slot]), newest[None])[0, 0]
                for place, position in enumerate(newest.tolist()):
                    if position < 0:
                        assert not read[place].any()
                    elif position >= request.since:
                        assert torch.equal(read[place], request.query(position, layer)[0])


@examples(150)
@given(st.data(), st.integers(1, 4))
def test_records_follow_requests(data: st.DataObject, most: int) -> None:
    pool = Pool(most)
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
        pool.step(order, tokens, [data.draw(st.integers(0, 9)) > 0 for _ in range(count)])


def test_a_live_record_is_never_thrown_out_for_one_that_is_not() -> None:
    """Both run to the end of a step; then one is gone, and its successor comes first in the batch."""
    pool = Pool(2)
    pool.add()
    pool.add()
    pool.step([0, 1], [3, 3], [True, True])
    pool.drop(1)
    pool.free.reverse()  # the successor gets other pages
    pool.add()
    pool.step([1, 0], [1, 1], [True, True])
    assert pool.running[0].since == 0


def test_records_are_bounded() -> None:
    pool = Pool(3)
    for _ in range(50):
        pool.add()
        pool.step(list(range(len(pool.running))), [5] * len(pool.running), [True] * len(pool.running))
        if len(pool.running) == 3:
            pool.drop(0)
    assert len(pool.windows._records) <= 2 * 3
    assert pool.windows._slots <= 7


def test_a_record_of_another_length_is_not_taken() -> None:
    windows = QueryWindows(1, 4, 3)
    first = windows.follow(0, 7, 0, 0, 10)
    assert windows.follow(7, 7, 10, 10, 11) is first
    other = windows.follow(7, 7, 9, 9, 10)  # the page went to someone else, who is not as long
    assert other is not first and other.start == 9
    assert windows.follow(7, 7, 0, 0, 10) is not other  # one that begins has no past


def test_forgetting_gives_the_ring_back() -> None:
    windows = QueryWindows(1, 4, 3)
    slot = windows.follow(0, 7, 0, 0, 10).slot
    windows.forget(7)
    windows.forget(7)
    assert windows.follow(0, 9, 0, 0, 3).slot == slot


@pytest.mark.parametrize("layer", range(2))
def test_layers_have_rings_of_their_own(layer: int) -> None:
    windows = QueryWindows(2, 4, 3)
    record = windows.follow(0, 7, 0, 0, 2)
    places = torch.arange(2)
    capture = QueryCapture(places, torch.full_like(places, record.slot), places)
    windows.add(range(layer, layer + 1), torch.ones(1, 2, 3, 5), capture)
    read = windows.read(range(layer, layer + 1), torch.tensor([record.slot]), torch.tensor([[-2, -1, 0, 1]]))
    assert read.shape == (1, 3, 4, 5)
    assert read[0, :, :2].eq(0).all() and read[0, :, 2:].eq(1).all()
