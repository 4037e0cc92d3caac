"""Needle maps: how often a recipe finds what lies at which depth of a text of which length."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from keepset.bench.analysis.rows import by_example
from keepset.bench.record import Record

PARTS = 10
"""Of the depth, from the text's beginning to its end."""


@dataclass(frozen=True)
class NeedleMap:
    """One recipe's scores and numbers of examples: a row for each tenth of the depth, a column for each length.

    The task is named without the length; a score is None where there are no examples.
    """

    task: str
    recipe: str
    lengths: list[float]
    scores: list[list[float | None]]
    examples: list[list[int]]


def needle_maps(records: Iterable[Record]) -> list[NeedleMap]:
    """Maps of all recipes on the tasks whose examples say a depth, from 0 to 1, and a length.

    An example counts once in its square, with the mean of its seeds; a recipe's error is no answer. Where a recipe
    failed throughout, it has no map.
    """
    by_recipe: dict[tuple[str, str], list[Record]] = {}
    lengths: dict[str, set[float]] = {}
    for record in records:
        if _place(record) is not None:
            task = record.task.partition("@")[0]
            by_recipe.setdefault((task, record.recipe), []).append(record)
            lengths.setdefault(task, set()).add(float(record.facts["length"]))
    return [
        _map(task, recipe, sorted(lengths[task]), each)
        for (task, recipe), each in by_recipe.items()
        if any(record.error is None for record in each)
    ]


def _map(task: str, recipe: str, lengths: list[float], records: list[Record]) -> NeedleMap:
    squares: dict[tuple[int, float], list[tuple[str, float]]] = {}
    for record in records:
        place = _place(record)
        assert place is not None
        squares.setdefault(place, []).append((record.example, record.score))
    values = [[by_example(squares.get((part, length), [])) for length in lengths] for part in range(PARTS)]
    scores = [[fmean(each) if each else None for each in line] for line in values]
    return NeedleMap(task, recipe, lengths, scores, [[len(each) for each in line] for line in values])


def _place(record: Record) -> tuple[int, float] | None:
    depth, length = record.facts.get("depth"), record.facts.get("length")
    if isinstance(depth, str) or isinstance(length, str) or depth is None or length is None or not 0 <= depth <= 1:
        return None
    return min(math.floor(depth * PARTS), PARTS - 1), float(length)
