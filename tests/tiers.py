"""Tests come in two tiers, the fast one and, with `pytest --full`, all; CONTRIBUTING.md says which goes where."""

from __future__ import annotations

import os
import sys
from collections import Counter
from itertools import combinations
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
    """So many random examples in the full tier, a sixteenth of them in the fast one.

    The same in every run, since a near tie must not fail once in a thousand runs; unless the full tier says otherwise.
    """
    number, derandomize = (number, derandomize) if FULL else (min(number, max(4, number // 16)), True)
    return settings(max_examples=number, derandomize=derandomize, **options)


def narrow(metafunc: pytest.Metafunc) -> None:
    """Leave of a test's combinations those that this tier runs, if it is marked `cross`, `spread` or `few`.

    Those that `cross` adds in the full tier are marked `full`. Others are never collected: there are twice as many of
    them as of all tests that run, and to make them takes seconds.
    """
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    for marker, choose in ("cross", _pairwise if FULL else _diagonal), ("spread", _spread):
        if marker in marks and metafunc._calls:
            product, calls = _product(metafunc), metafunc._calls
            chosen = choose(product)
            if marker == "cross":
                for number in chosen - _diagonal(product):
                    calls[number].marks.append(pytest.mark.full.mark)
            metafunc._calls = [call for number, call in enumerate(calls) if number in chosen]
    if "few" in marks and not FULL:
        (most,) = metafunc.definition.get_closest_marker("few").args or (sys.maxsize,)
        quick = [call for call in metafunc._calls if "full" not in {mark.name for mark in call.marks}]
        metafunc._calls = _few(quick, most) or metafunc._calls


def _few(calls: list[Any], most: int) -> list[Any]:
    """Choose combinations until each value is in one: always the one with most new values, of these that of the rarest.

    Args:
        calls: a test's combinations, in their order; their values include those of fixtures.
        most: how many are chosen at most.
    """
    values = [list(call.indices.items()) for call in calls]
    missing = {value for own in values for value in own}
    met: Counter[tuple[str, int]] = Counter()
    chosen: set[int] = set()

    def worth(number: int) -> tuple[int, int]:
        return len(missing.intersection(values[number])), -sum(met[value] for value in values[number])

    while missing and len(chosen) < most:
        best = max(range(len(calls)), key=worth)
        chosen.add(best)
        met.update(values[best])
        missing.difference_update(values[best])
    return [call for number, call in enumerate(calls) if number in chosen]


Product = dict[int, tuple[int, ...]]
"""All combinations of a test's parameters: which value each of them has of each axis, numbered."""


def _product(metafunc: pytest.Metafunc) -> Product:
    axes = []
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        axes.append(names[0])
    return {number: tuple(call.indices[axis] for axis in axes) for number, call in enumerate(metafunc._calls)}


def _diagonal(product: Product) -> set[int]:
    """Enough combinations that each value of each axis is in one."""
    sizes = [max(axis) + 1 for axis in zip(*product.values(), strict=True)]
    diagonal = {tuple(k % size for size in sizes) for k in range(max(sizes))}
    return {number for number, place in product.items() if place in diagonal}


def _spread(product: Product) -> set[int]:
    """Enough combinations that each value of the longest axis is in one, and each combination of the other axes."""
    sizes = [max(axis) + 1 for axis in zip(*product.values(), strict=True)]
    longest = sizes.index(max(sizes))
    split = {number: (place[longest], place[:longest] + place[longest + 1 :]) for number, place in product.items()}
    others = sorted({rest for _, rest in split.values()})
    chosen = {(k % sizes[longest], others[k % len(others)]) for k in range(max(sizes[longest], len(others)))}
    return {number for number, place in split.items() if place in chosen}


def _pairwise(product: Product) -> set[int]:
    """Enough combinations that any two values of two axes are together in one, and the diagonal: always the best next.

    Of one axis or two that is all.
    """
    bits: dict[object, int] = {}  # of each pair of values
    pairs = {
        number: sum(1 << bits.setdefault(pair, len(bits)) for pair in combinations(enumerate(place), 2))
        for number, place in product.items()
    }
    if not all(pairs.values()):
        return set(product)
    chosen = _diagonal(product)
    missing = (1 << len(bits)) - 1
    for number in chosen:
        missing &= ~pairs[number]
    while missing:
        best = max(product, key=lambda number: (pairs[number] & missing).bit_count())
        chosen.add(best)
        missing &= ~pairs[best]
    return chosen
