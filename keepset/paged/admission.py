"""`Admission`: how many blocks must be free for a waiting request to run together with all running ones."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from keepset.paged.eviction import EvictionSchedule

_PIECE = 128
"""The least number of steps that are added to a request's forecast at once: fewer are not worth a call."""


@dataclass
class _Course:
    """A running request, and its coming steps.

    Attributes:
        prompt, length: tokens of its prompt, and tokens that were processed.
        step: the step in which `length` was known.
        schedule: when it is compressed.
        most: the most tokens that it ever has; None if that is not known.
        base: after a coming step `n` it will have `base + n` tokens.
        end: the last step for which its blocks are in the sums.
    """

    prompt: int
    length: int
    step: int
    schedule: EvictionSchedule
    most: int | None = None
    base: int = 0
    end: int = 0


class Admission:
    """Forecasts the blocks of all running requests, each of which takes one token per step.

    With compression every I tokens a request's blocks rise and fall. Requests have their maxima in different steps, so
    the largest sum over the coming steps is less than the sum of all maxima. The sums reach lcm(every, block size)
    steps ahead: after that the pattern repeats. Requests that still grow after that are not forecast. A request that
    ends before holds nothing from then on.

    The sums are kept by step. A request is added when it starts, its forecast piece by piece, and changed only if it
    did not follow the forecast. So neither a step nor a query visits all requests.

    Within a step requests are scheduled one after another, and each frees its empty blocks in its turn. Requests before
    it cannot have these, so a request counts with the blocks of the step before if those are more.

    Args:
        schedule: when requests without a budget of their own are compressed.
        tokens_per_step: tokens of all requests that are computed in a step, at most.
        steps_ahead: steps that are scheduled before the tokens of one are processed (asynchronous scheduling).
    """

    def __init__(self, schedule: EvictionSchedule, tokens_per_step: int, steps_ahead: int = 0) -> None:
        every = schedule.recipe.schedule.every
        assert every is not None
        self._schedule, self._tokens_per_step, self._steps_ahead = schedule, tokens_per_step, steps_ahead
        self._reach = math.lcm(every, schedule.block_size) + 2
        self._piece = max(self._reach, _PIECE)
        # For each coming step, in a ring: the blocks that requests hold in their turns, and those after the step.
        self._sums = np.zeros((2, self._reach + self._piece + 1), dtype=np.int64)
        self._step = 0
        self._courses: OrderedDict[str, _Course] = OrderedDict()  # the least recently updated is first
        self._ends: defaultdict[int, set[str]] = defaultdict(set)
        self._prompts: dict[str, int] = {}  # of requests whose prompts are being computed

    def update(
        self,
        name: str,
        prompt: int,
        length: int,
        request_schedule: EvictionSchedule | None = None,
        most: int | None = None,
    ) -> None:
        """Note that a request is scheduled, again or for the first time.

        Args:
            name: the engine's name of the request.
            prompt: tokens of its prompt.
            length: tokens that were processed.
            request_schedule: when it is compressed, if it has a budget of its own; with as many tokens between events.
            most: the most tokens that it ever has, if that is known.
        """
        course = self._courses.get(name)
        if course is None:
            self._courses[name] = course = _Course(prompt, length, self._step, request_schedule or self._schedule, most)
            self._add(name, course)
            return
        self.go_on([(name, length)])

    def go_on(self, scheduled: Iterable[tuple[str, int]]) -> None:
        """Note that running requests are scheduled again.

        Args:
            scheduled: the engine's name of each, and its tokens that were processed, in the order of their turns.
        """
        for name, length in scheduled:
            course = self._courses[name]
            if course.step == self._step and length > course.length:
                self._advance()
            course.length, course.step = length, self._step
            self._courses.move_to_end(name)
            if self._prompts and length >= course.prompt:
                self._prompts.pop(name, None)
            if length != course.base + self._step:
                self._move(name, course)

    def remove(self, name: str) -> None:
        """Forget a request that ended or was preempted, if it ever ran."""
        if (course := self._courses.pop(name, None)) is not None:
            self._take(name, course)

    def required_blocks(
        self,
        tokens: int,
        needed: int,
        blocks_of: Callable[[str], int],
        request_schedule: EvictionSchedule | None = None,
        most: int | None = None,
    ) -> int:
        """Return how many blocks must be free to admit a request, once those that run are scheduled.

        Args:
            tokens: tokens of the waiting request, all of which are computed in the next steps.
            needed: blocks that it needs for them.
            blocks_of: returns the blocks that a running request has, by its name.
            request_schedule: when the waiting request is compressed, if it has a budget of its own.
            most: the most tokens that it ever has, if that is known.
        """
        schedule = request_schedule or self._schedule
        late = list(takewhile(lambda name: self._courses[name].step != self._step, self._courses))
        for name in late:  # these were not scheduled in this step
            self._courses[name].step = self._step
            self._move(name, self._courses[name])
        # A prompt's blocks are allocated chunk by chunk, but count from the first chunk on.
        missing = 0
        for name, prompt in self._prompts.items():
            course = self._courses[name]
            missing += int(self._blocks(course.schedule, course.most, prompt, prompt, 1)[0]) - blocks_of(name)
        steps = self._steps_until_compressed(tokens)
        newcomer = np.full(self._reach, needed, dtype=np.int64)
        compressed = self._blocks(schedule, most, tokens, tokens, 1)[0]
        newcomer[steps - self._steps_ahead :] += compressed - -(-tokens // schedule.block_size)
        if steps + 1 < self._reach:
            later = self._blocks(schedule, most, tokens, tokens + 1, self._reach - steps)
            newcomer[steps + 1 :] = np.maximum(later[:-1], later[1:])
        coming = np.arange(self._step + 1, self._step + self._reach + 1)
        in_turns, after = self._sums.take(coming, axis=1, mode="wrap")
        current = in_turns[0] = after[0]
        return int((in_turns + newcomer).max() - current + missing)

    def _steps_until_compressed(self, tokens: int) -> int:
        """Return the steps until so many tokens of a prompt are processed beside the other requests."""
        return -(-tokens // max(self._tokens_per_step - len(self._courses), 1)) + self._steps_ahead

    def _advance(self) -> None:
        self._step += 1
        self._sums[:, self._step % self._sums.shape[1]] = 0
        for name in self._ends.pop(self._step + self._reach - 1, ()):
            course = self._courses[name]
            self._change(course, course.end + 1, course.end + self._piece, 1)
            course.end += self._piece
            self._ends[course.end].add(name)

    def _add(self, name: str, course: _Course) -> None:
        length = course.length
        if length < course.prompt:
            self._prompts[name] = course.prompt
            length = course.prompt - self._steps_until_compressed(course.prompt - length)
        course.base, course.end = length - self._step, self._step + self._piece
        self._change(course, self._step + 1, course.end, 1)
        self._ends[course.end].add(name)

    def _take(self, name: str, course: _Course) -> None:
        self._change(course, self._step + 1, course.end, -1)
        self._ends[course.end].discard(name)
        self._prompts.pop(name, None)

    def _move(self, name: str, course: _Course) -> None:
        self._take(name, course)
        self._add(name, course)

    def _change(self, course: _Course, first: int, last: int, sign: int) -> None:
        """Add a request's blocks in steps `first` to `last` to the sums; with `sign` -1, subtract them.

        Args:
            course: the request's course.
            first: the number of the first step.
            last: the number of the last step.
            sign: 1 to add, -1 to subtract.
        """
        blocks = self._blocks(course.schedule, course.most, course.prompt, course.base + first - 1, last - first + 2)
        changes = sign * np.stack((np.maximum(blocks[:-1], blocks[1:]), blocks[1:]))
        size = self._sums.shape[1]
        start = first % size
        front = min(size - start, changes.shape[1])
        self._sums[:, start : start + front] += changes[:, :front]
        self._sums[:, : changes.shape[1] - front] += changes[:, front:]

    def _blocks(self, schedule: EvictionSchedule, most: int | None, prompt: int, first: int, number: int) -> np.ndarray:
        """Return a request's blocks in the steps from `first` tokens on: at least its prompt's blocks until it ends.

        Args:
            schedule: when the request is compressed.
            most: the most tokens that it ever has; None if there is no such limit.
            prompt: tokens of its prompt.
            first: its tokens in the first step.
            number: the number of steps, one token each.

        Returns:
            One number of blocks per step.
        """
        end = first + number
        tokens = np.arange(first, end)
        ahead = np.maximum(tokens, prompt) + self._steps_ahead
        if most is not None:  # no step is scheduled beyond its end
            ahead = np.minimum(ahead, max(most, prompt))
        counts = -(-ahead // schedule.block_size)
        done = first
        while done < end:
            # Blocks that an event empties are freed when the next step is scheduled; between two events none are.
            event = schedule.next_event(prompt, done - 1)
            until = end if event is None else min(event + 1, end)
            counts[done - first : until - first] -= schedule.freed(prompt, done - 1)
            done = until
        return counts if most is None else np.where(tokens > max(most, prompt), 0, counts)
