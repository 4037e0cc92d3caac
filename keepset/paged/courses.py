"""`RequestCourses`: what stays the same of each request from step to step, until something is due."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from keepset.paged.eviction import EvictionSchedule
from keepset.paged.step import RequestRows, ScheduledRequest

_PROMPT, _BEGIN, _QUIET, _UNTIL, _DROPPED, _COMPRESSED = range(6)


class StepCourses(NamedTuple):
    """What is known of a step's requests before it is planned.

    Attributes:
        active: the requests for which something may be due in the step. For the others nothing is recorded, and no
            event follows.
        dropped: entries that each head of each request has lost, on average, before the step, `[requests]`.
        compressed: whether each request was compressed before, `[requests]`.
        quiet: up to how many tokens nothing is due for each request, `[requests]`.
    """

    active: list[ScheduledRequest]
    dropped: np.ndarray
    compressed: np.ndarray
    quiet: np.ndarray


class SteadyRows:
    """The requests of a step after which nothing is due, until a step does something else than decode one more of each.

    While they go on, each row has the same request: one that has had the row before would have another prompt, or other
    tokens, or would not be decoding yet.

    Args:
        rows: the step's requests.
        courses: what is known of them.
    """

    def __init__(self, rows: RequestRows, courses: StepCourses) -> None:
        self._row, self._prompt, self._after = (part.copy() for part in (rows.row, rows.prompt, rows.after))
        self.courses = courses._replace(active=[])

    def go_on(self, rows: RequestRows) -> bool:
        """Return whether a step decodes one more token of each request, and nothing is due then either.

        Args:
            rows: the requests of the step after the one before.
        """
        if len(rows) != len(self._row):
            return False
        after = self._after + 1
        same = (rows.row == self._row) & (rows.prompt == self._prompt) & (rows.before == self._after)
        if not (same & (rows.after == after) & (rows.before >= rows.prompt) & (after <= self.courses.quiet)).all():
            return False
        self._after = after
        return True


class RequestCourses:
    """The courses of requests, by their rows of the batch.

    A course follows from the numbers of tokens alone, so it does not matter whether a row still has the same request.

    Args:
        schedule: when requests are compressed.
        quiet_until: says up to how many tokens a step may lead a request if nothing is to be recorded; its arguments
            are tokens of the prompt, tokens before the step, and tokens at the next event.
    """

    def __init__(self, schedule: EvictionSchedule, quiet_until: Callable[[int, int, int], int]) -> None:
        self._schedule, self._quiet_until = schedule, quiet_until
        self._numbers = np.zeros((6, 0), dtype=np.int64)

    def follow(self, requests: RequestRows) -> StepCourses:
        """Return the courses of a step's requests.

        Args:
            requests: the step's requests.
        """
        most = int(requests.row.max(initial=-1)) + 1
        if most > self._numbers.shape[1]:
            self._numbers = np.zeros((6, 2 * most), dtype=np.int64)
        courses = self._numbers[:, requests.row]
        holds = courses[_PROMPT] == requests.prompt
        holds &= (courses[_BEGIN] <= requests.before) & (requests.before < courses[_UNTIL])
        if requests.given is not None:
            holds[requests.with_own()] = False  # another request with as many tokens may have had the row
        for index in (~holds).nonzero()[0].tolist():
            courses[:, index] = self._course(requests[index])
            self._numbers[:, requests.row[index]] = courses[:, index]
        indices = (requests.after > courses[_QUIET]).nonzero()[0].tolist()
        active = [requests[index] for index in indices] if indices else []
        return StepCourses(active, courses[_DROPPED], courses[_COMPRESSED] > 0, courses[_QUIET])

    def _course(self, request: ScheduledRequest) -> tuple[int, ...]:
        schedule, prompt, before = request.own or self._schedule, request.prompt, request.before
        begin, event = schedule.newest_event(prompt, before), schedule.next_event(prompt, before)
        until = _NEVER if event is None else event
        quiet = self._quiet_until(prompt, before, until)
        facts = schedule.dropped(prompt, before), int(schedule.was_compressed(prompt, before))
        known_prompt = prompt if request.own is None else -1  # others with as many tokens have another course
        return known_prompt, begin, quiet, until, *facts


_NEVER = 1 << 62
