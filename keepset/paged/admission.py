"""Admission: how many blocks must be free, so that a waiting request and all that run can go on side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keepset.paged.eviction_schedule import EvictionSchedule


class Footprint(NamedTuple):
    """A running request: the tokens of its prompt, and those processed so far."""

    prompt: int
    length: int


def required_blocks(schedule: EvictionSchedule, running: Sequence[Footprint], tokens: int, needed: int) -> int:
    """Blocks that must be free now for a request of `tokens` tokens to be admitted.

    With compression every I tokens a request's blocks rise and fall. Looking ahead over one interval, in which
    each request takes one token per step, says what all of them need at the worst moment, which is less than the
    sum of everyone's worst. The newcomer holds its whole prompt for a step, and then what its compression leaves.

    Args:
        schedule: when requests are compressed.
        running: the requests that run.
        tokens: the newcomer's, all of which are computed in the next steps.
        needed: blocks that it needs for them.
    """
    every = schedule.recipe.schedule.every
    assert every is not None
    growth = _held(schedule, Footprint(tokens, 0), every + 1)
    growth[:2] = needed
    for request in running:
        growth += _held(schedule, request, every + 1) - schedule.num_blocks(*request)
    return int(growth.max())


def _held(schedule: EvictionSchedule, request: Footprint, steps: int) -> np.ndarray:
    """Blocks of a request now and after each of the next steps, one token each; a prompt's rest in the first."""
    prompt, length = request.prompt, max(request.length, request.prompt)
    ahead = int(request.length < prompt)
    held = np.empty(steps + 1, dtype=np.int64)
    held[ahead] = schedule.num_blocks(prompt, length)
    done, last = 1, steps - ahead
    while done <= last:
        # What a step's event empties is freed when the next step is scheduled, and nothing between two events.
        event = schedule.next_event(prompt, length + done - 1)
        until = last + 1 if event is None else min(event - length + 1, last + 1)
        lengths = length + np.arange(done, until)
        freed = schedule.freed(prompt, length + done - 1)
        held[ahead + done : ahead + until] = -(-lengths // schedule.block_size) - freed
        done = until
    if ahead:
        held[:2] = -(-prompt // schedule.block_size)
    return held
