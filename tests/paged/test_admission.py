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

    @property
    def most(self) -> int:
        return self.prompt + self.answer

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

    def __init__(self, schedule: EvictionSchedule, blocks: int, budget: int, steps_ahead: int, ends: bool) -> None:
        self.schedule, self.free, self.budget, self.steps_ahead = schedule, blocks, budget, steps_ahead
        self.ends = ends  # whether it is known when requests end
        self.admission = Admission(schedule, budget, steps_ahead)
        self.running: list[Request] = []
        self.flying: deque[list[tuple[Request, int]]] = deque()
        self.preemptions = 0

    def allocate(self, request: Request, tokens: int) -> bool:
        if request.blocks:
            self.free += request.free(self.schedule)
            self.admission.update(request.name, request.prompt, request.length, None, self.most(request))
        more = request.grow(self.schedule, tokens)
        if len(more) > self.free:
            return False
        if not request.blocks:
            self.admission.update(request.name, request.prompt, request.length, None, self.most(request))
        request.blocks |= more
        self.free -= len(more)
        return True

    def most(self, request: Request) -> int | None:
        return request.most if self.ends else None

    def end(self, request: Request) -> None:
        self.running.remove(request)
        self.free += len(request.blocks)
        request.blocks = set()
        self.admission.remove(request.name)

    def step(self, waiting: list[Request]) -> None:
        left, batch = self.budget, []
        for request in list(self.running):
            tokens = min(max(request.prompt - request.scheduled, 1), left)
            if request not in self.running or not tokens or request.scheduled >= request.most:
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
            most = self.most(request)
            if self.admission.required_blocks(request.prompt, needed, blocks.__getitem__, None, most) > self.free:
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
                if request in self.running and request.length >= request.most:
                    self.end(request)


@examples(60)
@given(
    st.booleans(), st.integers(4, 40), st.integers(1, 40), st.booleans(), st.integers(0, 1), st.booleans(), st.data()
)
def test_who_was_admitted_is_not_preempted(
    large: bool, keep: int, every: int, tight: bool, steps_ahead: int, ends: bool, data: st.DataObject
) -> None:
    """Prompts fill the budget, so that what a request holds is foreseen for good."""
    block_size, budget = 16 if large else 4, 24 if tight else 1000
    schedule = schedule_of(f"knorm(keep={keep}, every={every})", block_size)
    sizes = data.draw(st.lists(st.tuples(st.integers(keep, keep + 90), st.integers(1, 120)), min_size=2, max_size=10))
    waiting = [Request(str(number), *size) for number, size in enumerate(sizes)]
    longest = max(prompt for prompt, _ in sizes)
    pool = -(-(longest + keep + every) // block_size) + 2 + data.draw(st.integers(0, 30))
    scheduler = Scheduler(schedule, pool, budget, steps_ahead, ends)
    for _ in range(2000):
        if not (waiting or scheduler.running):
            break
        scheduler.step(waiting)
        assert scheduler.preemptions == 0
    assert not waiting and not scheduler.running and scheduler.free == pool


def test_requests_that_end_before_their_first_event_all_run_at_once() -> None:
    """100 requests of 64 + 96 tokens never have more than 5 blocks each, whatever the recipe would let them grow to."""
    steps = {}
    for ends in (False, True):
        scheduler = Scheduler(schedule_of("knorm(keep=1024, every=512)", 32), 600, 8192, 0, ends)
        waiting, steps[ends] = [Request(str(number), 64, 95) for number in range(100)], 0
        while waiting or scheduler.running:
            scheduler.step(waiting)
            steps[ends] += 1
        assert scheduler.preemptions == 0 and scheduler.free == 600
    assert steps[True] == 96 < steps[False]


def foreseen(admission: Admission, requests: list[Request], tokens: int, needed: int, most: int) -> int:
    """The blocks that must be free, added up request by request and step by step."""
    schedule, budget, ahead = admission._schedule, admission._tokens_per_step, admission._steps_ahead
    reach = math.lcm(schedule.recipe.schedule.every or 1, schedule.block_size) + 2

    def steps(more: int) -> int:
        return -(-more // max(budget - len(requests), 1)) + ahead if more else 0

    def whole(tokens: int, most: int) -> int:
        return -(-min(tokens + ahead, most) // schedule.block_size)

    def blocks(prompt: int, length: int, most: int, step: int) -> int:
        """Held in a step; those of all its prompt until that is done, and none after its end."""
        rest = steps(max(prompt - length, 0))
        if rest and step <= rest:
            return whole(prompt, most)
        tokens = max(length, prompt) + step - rest
        return whole(tokens, most) - schedule.freed(prompt, tokens - 1) if tokens <= most else 0

    held = sum(
        len(each.blocks) if each.length < each.prompt else blocks(each.prompt, each.length, each.most, 1)
        for each in requests
    )
    peak = 0
    for step in range(1, reach + 1):
        # The newcomer is the last in its step, so its prompt's blocks are there while the others take theirs.
        rest, own = steps(tokens), needed
        if step > rest - ahead:
            own += whole(tokens, most) - -(-tokens // schedule.block_size)
        if step > rest + 1:
            grown = [tokens + step - rest, tokens + step - rest - 1]
            own = max(whole(each, most) - schedule.freed(tokens, each - 1) if each <= most else 0 for each in grown)
        others = sum(
            max(blocks(one.prompt, one.length, one.most, each) for each in {step, max(step - 1, 1)}) for one in requests
        )
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
                case "run" if request.length < request.most:
                    rest = request.prompt - request.length
                    request.length += data.draw(st.integers(1, rest)) if rest > 0 else 1
                    admission.update(request.name, request.prompt, request.length, None, request.most)
                    request.blocks = set(range(-(-request.length // admission._schedule.block_size)))
                case "end":
                    requests.remove(request)
                    admission.remove(request.name)
        if data.draw(st.booleans()):
            prompt, answer = data.draw(st.integers(1, 90)), data.draw(st.integers(0, 60) | st.just(10**9))
            length = data.draw(st.integers(0, min(prompt + answer, 200)))
            requests.append(Request(str(number), prompt, answer, length))
            admission.update(str(number), prompt, length, None, prompt + answer)
        tokens = data.draw(st.integers(1, 120))
        needed = -(-tokens // admission._schedule.block_size)
        needed -= data.draw(st.integers(0, needed - 1))  # some are cached
        blocks = {request.name: len(request.blocks) for request in requests}
        # Who computes a prompt was foreseen beside so many others as there were then.
        for request in requests:
            if request.length < request.prompt:
                admission._move(request.name, admission._courses[request.name])
        most = tokens + data.draw(st.integers(0, 60) | st.just(10**9))
        required = admission.required_blocks(tokens, needed, blocks.__getitem__, None, most)
        assert required == foreseen(admission, requests, tokens, needed, most)


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
