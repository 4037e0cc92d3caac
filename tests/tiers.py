"""Tests come in two tiers, the fast one and, with `pytest --full`, all; CONTRIBUTING.md says which goes where."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable
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
    """So many random examples in the full tier, an eighth of them in the fast one.

    The same in every run, since a near tie must not fail once in a thousand runs; unless the full tier says otherwise.
    """
    number, derandomize = (number, derandomize) if FULL else (min(number, max(5, number // 8)), True)
    return settings(max_examples=number, derandomize=derandomize, **options)


def of_full_tier(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What is marked `full`, and of tests marked `cross` what is off the diagonal of their parameters' product."""
    items = list(items)
    outside = {item for product in _products(items, "cross") for item in product.keys() - set(_diagonal(product))}
    return {item for item in items if item.get_closest_marker("full")} | outside


def of_no_tier(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Of tests marked `cross` what has no pair of values that none of the others has; what `spread` passes over."""
    items = list(items)
    crossed = {item for product in _products(items, "cross") for item in product.keys() - _pairwise(product)}
    return crossed | {item for product in _products(items, "spread") for item in product.keys() - _spread(product)}


Product = dict[pytest.Item, tuple[int, ...]]
"""All combinations of a test's parameters: which value each of them has of each axis, numbered."""


def _products(items: Iterable[pytest.Item], marker: str) -> Iterable[Product]:
    crossed: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker(marker):
            crossed[item.path, item.originalname].append(item)
    for of_test in crossed.values():
        places: list[list[int]] = [[] for _ in of_test]
        for mark in of_test[0].iter_markers("parametrize"):
            names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
            values: dict[tuple[int, ...], int] = {}
            for item, place in zip(of_test, places, strict=True):
                value = tuple(id(item.callspec.params[name]) for name in names)
                place.append(values.setdefault(value, len(values)))
        yield dict(zip(of_test, map(tuple, places), strict=True))


def _diagonal(product: Product) -> list[pytest.Item]:
    """Enough combinations that each value of each axis is in one."""
    sizes = [max(axis) + 1 for axis in zip(*product.values(), strict=True)]
    diagonal = {tuple(k % size for size in sizes) for k in range(max(sizes))}
    return [item for item, place in product.items() if place in diagonal]


def _spread(product: Product) -> set[pytest.Item]:
    """Enough combinations that each value of the longest axis is in one, and each combination of the other axes."""
    sizes = [max(axis) + 1 for axis in zip(*product.values(), strict=True)]
    longest = sizes.index(max(sizes))
    split = {item: (place[longest], place[:longest] + place[longest + 1 :]) for item, place in product.items()}
    others = sorted({rest for _, rest in split.values()})
    chosen = {(k % sizes[longest], others[k % len(others)]) for k in range(max(sizes[longest], len(others)))}
    return {item for item, place in split.items() if place in chosen}


def _pairwise(product: Product) -> set[pytest.Item]:
    """Enough combinations that any two values of two axes are together in one, and the diagonal: always the best next.

    Of one axis or two that is all.
    """
    pairs = {item: set(combinations(enumerate(place), 2)) for item, place in product.items()}
    if not all(pairs.values()):
        return set(product)
    chosen = set(_diagonal(product))
    missing = set().union(*pairs.values()).difference(*(pairs[item] for item in chosen))
    while missing:
        best = max(product, key=lambda item: len(pairs[item] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
