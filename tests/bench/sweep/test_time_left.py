"""What a sweep still takes, beside a clock that is known."""

from __future__ import annotations

from typing import Any, cast

import pytest

from keepset.bench.candidate import Candidate
from keepset.bench.sweep import time_left
from keepset.bench.sweep.sweep import Group
from keepset.bench.sweep.time_left import TimeLeft


class Timed:
    """A task whose prompts take a time each, and its answers another."""

    decodes = False

    def __init__(self, name: str, length: int | None = None) -> None:
        self.name = name
        if length is not None:
            self.length = length


def groups(task: Any, examples: int, recipes: int) -> list[Group]:
    return [Group(task, 0, cast(Any, None), [cast(Candidate, None)] * recipes) for _ in range(examples)]


def test_whole_groups_tell_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt takes 30 seconds, its five cells one each: a mean of cells would be wrong after any but the last."""
    clock = [0.0]
    monkeypatch.setattr(time_left.time, "monotonic", lambda: clock[0])
    left = TimeLeft(groups(Timed("needle", 1000), 4, 5) + groups(Timed("needle long", 2000), 2, 5))
    told = []
    for _ in range(4):
        clock[0] += 30.0
        for _ in range(5):
            clock[0] += 1.0
            left.advance()
            told.append(left.seconds())
    assert told[:4] == [None] * 4
    # Prompts of twice the length take twice the time until one was measured.
    assert told[4:] == [3 * 35 + 2 * 70] * 5 + [2 * 35 + 2 * 70] * 5 + [35 + 2 * 70] * 5 + [2 * 70]
    clock[0] += 100.0
    left.advance(5)
    assert left.seconds() == 100.0
    left.advance(5)
    assert left.seconds() == 0


def test_the_first_group_has_what_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time_left.time, "monotonic", lambda: clock[0])
    left = TimeLeft(groups(Timed("a"), 4, 1))
    for seconds, expected in ((90.0, 270.0), (5.0, 10.0), (5.0, 5.0)):
        clock[0] += seconds
        left.advance()
        assert left.seconds() == expected
