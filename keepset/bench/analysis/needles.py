"""Needle maps: how often a recipe finds a needle by its depth and the text's length."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from keepset.bench.analysis.rows import by_example
from keepset.bench.record import Record

PARTS = 10
"""Parts of the depth, from the text's beginning to its end."""


@dataclass(frozen=True)
class NeedleMap:
    """One recipe's scores by depth and length.

    Attributes:
        task: the task's name, without the length.
        recipe: the recipe's text.
        lengths: tokens of the texts, rising.
        scores: mean scores, a row for each tenth of the depth and a column for each length; None without examples.
        examples: numbers of examples, in the same rows and columns.
    """

    task: str
    recipe: str
    lengths: list[float]
    scores: list[list[float | None]]
    examples: list[list[int]]


def needle_maps(records: Iterable[Record]) -> list[NeedleMap]:
    """Return the maps of all recipes on the tasks whose examples have a depth, from 0 to 1, and a length.

    An example counts once in its square, with the mean of its seeds. An error counts as no answer. A recipe that failed
    on all examples has no map.
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
