"""Requests for which nothing is due are found by numbers alone, whoever had their rows before."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from keepset.paged.courses import RequestCourses
from keepset.paged.eviction import RequestPlan
from keepset.paged.recording_plan import RecordingPlanner
from keepset.paged.step import RequestRows, ScheduledRequest
from tests.paged import layers
from tests.paged.reference import newest_event
from tests.tiers import FULL

RECIPES = [
    "knorm(keep=10, every=7)",
    "snapkv(window=4, keep=10, every=9)",
    "snapkv(window=4, keep=10, every=9, prefill=False)",
    "snapkv(window=6, keep=10)",
    "kvcompose(keep=12)",
    "pool(snapkv(window=4), keep=10, every=8)",
    "adakv(expected_attention(buffer=4), keep=10, every=6)",
    "snapkv(window=4, keep=1000, every=5)",
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_courses_are_those_of_the_schedule(recipe: str) -> None:
    planner, random = layers.planner_of(recipe), Random(recipe)
    schedule = planner.schedule
    recording = RecordingPlanner(schedule, planner.recording, 2, planner.requests)
    courses = RequestCourses(schedule, recording.quiet_until)
    off = schedule.of_plan(RequestPlan(None))
    running: dict[int, tuple[int, int]] = {}
    quiet = 0
    for _ in range(2000 if FULL else 300):
        for row in random.sample(range(12), 3):  # others take these rows, or the same ones in another order
            running[row] = random.choice([*running.values(), (random.randrange(1, 30), 0)])
        step = []
        for row, (prompt, before) in sorted(running.items()):
            new = random.randrange(1, 12) if before < prompt else random.choice([1, 1, 1, 3])
            own = off if random.random() < 0.1 else None  # another request, with as many tokens
            step.append(ScheduledRequest(row, 0, new, prompt, before, before + new, own))
        told = courses.follow(RequestRows.of(step))
        for request, dropped, compressed in zip(step, told.dropped, told.compressed, strict=True):
            course = request.own or schedule
            assert dropped == course.dropped(request.prompt, request.before)
            assert compressed == course.was_compressed(request.prompt, request.before)
            if request not in told.active and request.own is None:
                quiet += 1
                assert not newest_event(schedule.recipe, request.prompt, request.before, request.after)
                assert not recording._windows(request) and not recording._is_collected(request)
        for request in step:
            back = random.choice([0, 0, request.after - request.before - 1])  # drafts that were not accepted
            length = request.after - (back if request.before >= request.prompt else 0)
            running[request.row] = request.prompt, length
            if length > 90:
                del running[request.row]
    assert quiet > 100


def test_requests_are_the_same_as_columns_and_as_objects() -> None:
    requests = [ScheduledRequest(row, 3 * row, 3 * row + 3, 7, row, row + 3) for row in (0, 2, 5)]
    given = RequestRows.of(requests)
    made = RequestRows(
        np.stack([given.row, given.first_query, given.end_query, given.prompt, given.before, given.after])
    )
    assert list(made) == list(given) == requests and made[1:] == requests[1:] and RequestRows.of(made) is made
    assert len(RequestRows.of([])) == 0
