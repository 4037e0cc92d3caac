"""Tests come in two tiers, the fast one and, with `pytest --full`, all; CONTRIBUTING.md says which goes where."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

FULL = "--full" in sys.argv or os.environ.get("KEEPSET_FULL") == "1"
"""Whether all tests run: said on the command line, or by the process that started this one."""
os.environ["KEEPSET_FULL"] = str(int(FULL))
TYPECHECK = os.environ.setdefault("KEEPSET_TYPECHECK", str(int(FULL))) == "1"
"""Whether types are checked while tests run."""

# No test asserts a wall time.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def examples(number: int, *, derandomize: bool = True, **options: Any) -> settings:
    """So many random examples in the full tier, an eighth of them in the fast one.

    The same in every run, since a near tie must not fail once in a thousand runs; unless the full tier says otherwise.
    """
    number, derandomize = (number, derandomize) if FULL else (min(number, max(5, number // 8)), True)
    return settings(max_examples=number, derandomize=derandomize, **options)


def of_full_tier(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What is marked `full`, and of tests marked `cross` what is off the diagonal of their parameters' product."""
    items = list(items)
    crossed: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("cross"):
            crossed[item.path, item.originalname].append(item)
    return {item for item in items if item.get_closest_marker("full")}.union(*map(_off_diagonal, crossed.values()))


def _off_diagonal(items: list[pytest.Function]) -> set[pytest.Item]:
    """All but enough combinations that each value of each axis is in one."""
    places: dict[pytest.Item, list[int]] = {item: [] for item in items}
    sizes = []
    for mark in items[0].iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        values: dict[tuple[int, ...], int] = {}
        for item in items:
            value = tuple(id(item.callspec.params[name]) for name in names)
            places[item].append(values.setdefault(value, len(values)))
        sizes.append(len(values))
    diagonal = [[k % size for size in sizes] for k in range(max(sizes))]
    return {item for item, place in places.items() if place not in diagonal}
