"""Admission: how many blocks must be free, so that a waiting request and all that run can go on side by side."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keepset.paged.eviction_schedule import EvictionSchedule

_PIECE = 128
"""Steps by which a request's future is added at least: short ones are not worth a call."""


@dataclass
class _Course:
    """A running request.

    Attributes:
        prompt, length: tokens of its prompt, and those processed so far.
        step: in which it last said so.
        base: it will have had `base + step` tokens in a coming step.
        schedule: when it is compressed.
        end: the last step for which its blocks were added.
    """

    prompt: int
    length: int
    step: int
    schedule: EvictionSchedule
    base: int = 0
    end: int = 0


class Admission:
    """Foresees the blocks of all running requests, each of which takes one token per step.

    With compression every I tokens a request's blocks rise and fall. The sum of what all hold in each of the next steps
    says what they need at the worst moment, which is less than the sum of everyone's worst. It reaches as far as events
    and blocks take to fall together again; who still grows towards its budget then, grows on unforeseen.

    The sums are kept, by step: a request is added when it starts, its future piece by piece, and moved only where it
    did not do what was foreseen. So neither a step nor a look at the sums goes through all requests.

    Within a step requests are scheduled one after another, and each frees what was emptied in its turn. Those before it
    must do without, so a request counts with the blocks of the step before where those are more.

    Args:
        schedule: when requests are compressed that have no budget of their own.
        tokens_per_step: that are computed at most, of all requests.
        steps_ahead: that are scheduled before the tokens of one are processed (asynchronous scheduling).
    """

    def __init__(self, schedule: EvictionSchedule, tokens_per_step: int, steps_ahead: int = 0) -> None:
        every = schedule.recipe.schedule.every
        assert every is not None
        self._schedule, self._tokens_per_step, self._steps_ahead = schedule, tokens_per_step, steps_ahead
        self._reach = math.lcm(every, schedule.block_size) + 2
        self._piece = max(self._reach, _PIECE)
        # Of each coming step, around in a circle: what requests hold in their turns, and what they hold after it.
        self._sums = np.zeros((2, self._reach + self._piece + 1), dtype=np.int64)
        self._step = 0
        self._courses: OrderedDict[str, _Course] = OrderedDict()  # who was heard of longest ago is first
        self._ends: defaultdict[int, set[str]] = defaultdict(set)
        self._prompts: dict[str, int] = {}  # that are being computed

    def update(self, name: str, prompt: int, length: int, own: EvictionSchedule | None = None) -> None:
        """A request is scheduled again, or for the first time.

        Args:
            name: the request's.
            prompt: tokens of its prompt.
            length: tokens that were processed.
            own: when it is compressed, if not as the others; with as many tokens between events.
        """
        course = self._courses.get(name)
        if course is None:
            self._courses[name] = course = _Course(prompt, length, self._step, own or self._schedule)
            self._add(name, course)
            return
        if course.step == self._step and length > course.length:
            self._advance()
        course.length, course.step = length, self._step
        self._courses.move_to_end(name)
        if self._prompts and length >= prompt:
            self._prompts.pop(name, None)
        if length != course.base + self._step:
            self._move(name, course)

    def remove(self, name: str) -> None:
        """A request ended or was preempted; or it never ran."""
        if (course := self._courses.pop(name, None)) is not None:
            self._take(name, course)

    def required_blocks(
        self, tokens: int, needed: int, held: Callable[[str], int], own: EvictionSchedule | None = None
    ) -> int:
        """Blocks that must be free now for a request to be admitted, once those that run are scheduled.

        Args:
            tokens: the newcomer's, all of which are computed in the next steps.
            needed: blocks that it needs for them.
            held: of a running request, the blocks that it has.
            own: when the newcomer is compressed, if not as the others.
        """
        schedule = own or self._schedule
        for name in self._late():
            self._courses[name].step = self._step
            self._move(name, self._courses[name])
        # A prompt's blocks come chunk by chunk, and count as if all were there.
        missing = sum(
            self._blocks(self._courses[name].schedule, prompt, prompt, 1)[0] - held(name)
            for name, prompt in self._prompts.items()
        )
        steps = self._steps_until_compressed(tokens)
        newcomer = np.full(self._reach, needed, dtype=np.int64)
        compressed = self._blocks(schedule, tokens, tokens, 1)[0]
        newcomer[steps - self._steps_ahead :] += compressed - -(-tokens // schedule.block_size)
        if steps + 1 < self._reach:
            later = self._blocks(schedule, tokens, tokens + 1, self._reach - steps)
            newcomer[steps + 1 :] = np.maximum(later[:-1], later[1:])
        coming = np.arange(self._step + 1, self._step + self._reach + 1)
        in_turns, after = self._sums.take(coming, axis=1, mode="wrap")
        now = in_turns[0] = after[0]
        return int((in_turns + newcomer).max() - now + missing)

    def _late(self) -> list[str]:
        """Requests that were not scheduled in this step, and are where they were."""
        late = []
        for name, course in self._courses.items():
            if course.step == self._step:
                break
            late.append(name)
        return late

    def _steps_until_compressed(self, tokens: int) -> int:
        """Steps that so many tokens of a prompt take beside the other requests, and until they are processed."""
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
        """Adds a request's blocks in these steps to the sums, or takes them away."""
        blocks = self._blocks(course.schedule, course.prompt, course.base + first - 1, last - first + 2)
        held = sign * np.stack((np.maximum(blocks[:-1], blocks[1:]), blocks[1:]))
        size = self._sums.shape[1]
        start = first % size
        front = min(size - start, held.shape[1])
        self._sums[:, start : start + front] += held[:, :front]
        self._sums[:, : held.shape[1] - front] += held[:, front:]

    def _blocks(self, schedule: EvictionSchedule, prompt: int, first: int, number: int) -> np.ndarray:
        """Blocks of a request in the steps that bring it to `first` tokens and more; all of its prompt's until then."""
        end = first + number
        tokens = np.arange(first, end)
        held = -(-(np.maximum(tokens, prompt) + self._steps_ahead) // schedule.block_size)
        done = first
        while done < end:
            # What a step's event empties is freed when the next step is scheduled, and nothing between two events.
            event = schedule.next_event(prompt, done - 1)
            until = end if event is None else min(event + 1, end)
            held[done - first : until - first] -= schedule.freed(prompt, done - 1)
            done = until
        return held
