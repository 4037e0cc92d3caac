"""A request is let in only where the pool will do for it and for all that run, whatever step comes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset import Recipe
from keepset.paged.admission import Admission
from keepset.paged.eviction import EvictionSchedule
from tests.tiers import examples

LAYERS = (0, 1)
BUDGETS = [
    "knorm(keep={}, every={})", "adakv(knorm, keep={}, every={})", "knorm(keep={}, every={}, prefill=False)",
    "random(keep={}, every={}, protect_prompt=True)",
]  # fmt: skip


def schedule_of(text: str, block_size: int) -> EvictionSchedule:
    return EvictionSchedule(Recipe.parse(text), 0, LAYERS, 3, 4, block_size)


KNORM = schedule_of("knorm(keep=16, every=16)", 4)


@dataclass
class Request:
    """A request as a scheduler knows it: `length` of its tokens were processed, `scheduled` are or are about to be."""

    name: str
    prompt: int
    answer: int = 10**9
    length: int = 0
    scheduled: int = 0
    blocks: set[int] = field(default_factory=set)

    def free(self, schedule: EvictionSchedule) -> int:
        """Gives back what its processed tokens have emptied."""
        freed = schedule.freed(self.prompt, self.length)
        gone = {block for block in self.blocks if block < freed}
        self.blocks -= gone
        return len(gone)

    def grow(self, schedule: EvictionSchedule, tokens: int) -> set[int]:
        """The blocks that it lacks for so many tokens."""
        freed, size = schedule.freed(self.prompt, self.length), schedule.block_size
        return set(range(max(self.blocks, default=freed - 1) + 1, -(-tokens // size)))


class Scheduler:
    """vLLM's in plain Python: running requests in their order, then waiting ones; who comes last is preempted."""

    def __init__(self, schedule: EvictionSchedule, blocks: int, budget: int, steps_ahead: int) -> None:
        self.schedule, self.free, self.budget, self.steps_ahead = schedule, blocks, budget, steps_ahead
        self.admission = Admission(schedule, budget, steps_ahead)
        self.running: list[Request] = []
        self.flying: deque[list[tuple[Request, int]]] = deque()
        self.preemptions = 0

    def allocate(self, request: Request, tokens: int) -> bool:
        if request.blocks:
            self.free += request.free(self.schedule)
            self.admission.update(request.name, request.prompt, request.length)
        more = request.grow(self.schedule, tokens)
        if len(more) > self.free:
            return False
        if not request.blocks:
            self.admission.update(request.name, request.prompt, request.length)
        request.blocks |= more
        self.free -= len(more)
        return True

    def end(self, request: Request) -> None:
        self.running.remove(request)
        self.free += len(request.blocks)
        request.blocks = set()
        self.admission.remove(request.name)

    def step(self, waiting: list[Request]) -> None:
        left, batch = self.budget, []
        for request in list(self.running):
            tokens = min(max(request.prompt - request.scheduled, 1), left)
            if request not in self.running or not tokens:
                continue
            while not self.allocate(request, request.scheduled + tokens):
                self.preemptions += 1
                self.end(self.running[-1])
                if request not in self.running:
                    break
            else:
                batch.append((request, tokens))
                left -= tokens
        while waiting and left and not self.preemptions:
            request = waiting[0]
            blocks = {running.name: len(running.blocks) for running in self.running}
            needed = -(-request.prompt // self.schedule.block_size)
            tokens = min(request.prompt, left)
            if self.admission.required_blocks(request.prompt, needed, blocks.__getitem__) > self.free:
                break
            assert self.allocate(request, tokens)
            self.running.append(waiting.pop(0))
            batch.append((request, tokens))
            left -= tokens
        for request, tokens in batch:
            request.scheduled += tokens
        self.flying.append(batch)
        if len(self.flying) > self.steps_ahead:
            for request, tokens in self.flying.popleft():
                request.length += tokens
                if request in self.running and request.length >= request.prompt + request.answer:
                    self.end(request)


@examples(60)
@given(st.booleans(), st.integers(4, 40), st.integers(1, 40), st.booleans(), st.integers(0, 1), st.data())
def test_who_was_admitted_is_not_preempted(
    large: bool, keep: int, every: int, tight: bool, steps_ahead: int, data: st.DataObject
) -> None:
    """Prompts fill the budget, so that what a request holds is foreseen for good."""
    block_size, budget = 16 if large else 4, 24 if tight else 1000
    schedule = schedule_of(f"knorm(keep={keep}, every={every})", block_size)
    sizes = data.draw(st.lists(st.tuples(st.integers(keep, keep + 90), st.integers(1, 120)), min_size=2, max_size=10))
    waiting = [Request(str(number), *size) for number, size in enumerate(sizes)]
    longest = max(prompt for prompt, _ in sizes)
    pool = -(-(longest + keep + every) // block_size) + 2 + data.draw(st.integers(0, 30))
    scheduler = Scheduler(schedule, pool, budget, steps_ahead)
    for _ in range(2000):
        if not (waiting or scheduler.running):
            break
        scheduler.step(waiting)
        assert scheduler.preemptions == 0
    assert not waiting and not scheduler.running and scheduler.free == pool


def foreseen(admission: Admission, requests: list[Request], tokens: int, needed: int) -> int:
    """The blocks that must be free, added up request by request and step by step."""
    schedule, budget, ahead = admission._schedule, admission._tokens_per_step, admission._steps_ahead
    reach = math.lcm(schedule.recipe.schedule.every or 1, schedule.block_size) + 2

    def steps(more: int) -> int:
        return -(-more // max(budget - len(requests), 1)) + ahead if more else 0

    def whole(tokens: int) -> int:
        return -(-(tokens + ahead) // schedule.block_size)

    def blocks(prompt: int, length: int, step: int) -> int:
        """Held in a step; those of all its prompt until that is done."""
        rest = steps(max(prompt - length, 0))
        if rest and step <= rest:
            return whole(prompt)
        tokens = max(length, prompt) + step - rest
        return whole(tokens) - schedule.freed(prompt, tokens - 1)

    held = sum(
        len(each.blocks) if each.length < each.prompt else blocks(each.prompt, each.length, 1) for each in requests
    )
    peak = 0
    for step in range(1, reach + 1):
        # The newcomer is the last in its step, so its prompt's blocks are there while the others take theirs.
        rest, own = steps(tokens), needed
        if step > rest - ahead:
            own += whole(tokens) - -(-tokens // schedule.block_size)
        if step > rest + 1:
            grown = [tokens + step - rest, tokens + step - rest - 1]
            own = max(whole(each) - schedule.freed(tokens, each - 1) for each in grown)
        others = sum(max(blocks(one.prompt, one.length, each) for each in {step, max(step - 1, 1)}) for one in requests)
        peak = max(peak, others + own)
    return peak - held


@st.composite
def admissions(draw: st.DrawFn) -> Admission:
    every, keep = draw(st.integers(1, 40)), draw(st.integers(1, 50))
    schedule = schedule_of(draw(st.sampled_from(BUDGETS)).format(keep, every), draw(st.sampled_from([1, 4, 16])))
    return Admission(schedule, draw(st.sampled_from([8, 40, 1000])), draw(st.integers(0, 1)))


@examples(150)
@given(admissions(), st.data())
def test_the_sums_are_those_of_a_count(admission: Admission, data: st.DataObject) -> None:
    """Requests come, go, are left out of steps, and compute their prompts in chunks of any size."""
    requests: list[Request] = []
    for number in range(data.draw(st.integers(1, 12))):
        for request in list(requests):
            match data.draw(st.sampled_from(["run", "run", "run", "run", "rest", "end"])):
                case "run":
                    rest = request.prompt - request.length
                    request.length += data.draw(st.integers(1, rest)) if rest > 0 else 1
                    admission.update(request.name, request.prompt, request.length)
                    request.blocks = set(range(-(-request.length // admission._schedule.block_size)))
                case "end":
                    requests.remove(request)
                    admission.remove(request.name)
        if data.draw(st.booleans()):
            requests.append(Request(str(number), data.draw(st.integers(1, 90)), length=data.draw(st.integers(0, 200))))
            admission.update(str(number), requests[-1].prompt, requests[-1].length)
        tokens = data.draw(st.integers(1, 120))
        needed = -(-tokens // admission._schedule.block_size)
        needed -= data.draw(st.integers(0, needed - 1))  # some are cached
        blocks = {request.name: len(request.blocks) for request in requests}
        # Who computes a prompt was foreseen beside so many others as there were then.
        for request in requests:
            if request.length < request.prompt:
                admission._move(request.name, admission._courses[request.name])
        required = admission.required_blocks(tokens, needed, blocks.__getitem__)
        assert required == foreseen(admission, requests, tokens, needed)


def test_a_step_costs_as_much_beside_a_thousand_requests_as_beside_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Futures are made piece by piece: for a newcomer at a look, and for a request whose piece ends, not for all."""
    made = []
    blocks = Admission._blocks
    monkeypatch.setattr(Admission, "_blocks", lambda self, *args: made.append(args[2]) or blocks(self, *args))
    for running in (10, 1000):
        admission = Admission(KNORM, 10**6)
        for step in range(3):
            made.clear()
            for number in range(running):
                admission.update(str(number), 64, 64 + number % 30 + step)
            if step == 0:
                assert len(made) == running
                continue
            admission.required_blocks(400, 100, lambda _: 0)
            assert len(made) == 2
