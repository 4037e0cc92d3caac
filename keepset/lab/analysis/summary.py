"""`summarize`: from records to rows by task and recipe, averages, curves, needle maps, and `conclusion`, a sentence."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np

from keepset.errors import KeepsetError
from keepset.lab.analysis.curves import Curve, area, compression
from keepset.lab.analysis.intervals import Figure
from keepset.lab.analysis.rows import Records, Row, average, by_example, row_of
from keepset.lab.record import FULL, Record, largest_first
from keepset.lab.tasks import longbench, longbench2, ruler
from keepset.recipe import Recipe

_GROUPS: dict[str, Sequence[str]] = {
    **{f"ruler {part}": names for part, names in ruler.PARTS.items()},
    "ruler": ruler.NAMES,
    **{f"longbench {part}": names for part, names in longbench.PARTS.items()},
    "longbench": longbench.NAMES,
    "longbench2": longbench2.NAMES,
}
"""Benchmarks, and parts of them, whose tasks are averaged; a benchmark comes after its parts."""
TOLERANCES = (0.1, 0.2)
"""Relative losses of accuracy from KVCompose's Table 2, at which the share that can be dropped is reported."""
PARTS = 10
"""Number of parts of the depth, from the text's beginning to its end."""
LEAST_EXAMPLES = 10
"""The fewest examples that allow a conclusion."""


@dataclass(frozen=True)
class Reach:
    """How much can be dropped within a tolerance; `at_least` if no smaller budget was measured."""

    tolerance: float
    removed: Figure
    at_least: bool

    @property
    def value(self) -> float:
        """The largest share that can be dropped."""
        return self.removed.value


@dataclass(frozen=True)
class Trade:
    """A method's accuracy over the share that it holds, on one task or the tasks of a group.

    Attributes:
        smallest: the smallest share; areas compare only if it is the same.
        budgets: number of budgets beside the full cache.
        examples: number of examples that have all budgets.
        failed: how often the method failed on an example, which counts as not answered.
        area: the area under the curve.
        reach: how much can be dropped within each tolerance.
    """

    task: str
    method: str
    smallest: float
    budgets: int
    examples: int
    failed: int
    area: Figure | None
    reach: list[Reach]


@dataclass(frozen=True)
class NeedleMap:
    """One recipe's scores on a task by depth and length.

    Attributes:
        lengths: tokens of the texts, rising.
        scores: mean scores, a row for each tenth of the depth and a column for each length; None without examples.
        examples: numbers of examples, in the same rows and columns.
    """

    task: str
    recipe: str
    lengths: list[float]
    scores: list[list[float | None]]
    examples: list[list[int]]


@dataclass(frozen=True)
class Summary:
    """All figures of a sweep; differences are to `baseline`."""

    baseline: str
    conclusion: str
    rows: list[Row]
    averages: list[Row]
    trades: list[Trade]
    needles: list[NeedleMap]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as `keepset results --json` prints it."""
        rows = {name: [row.to_json() for row in getattr(self, name)] for name in ("rows", "averages")}
        return {**asdict(self), **rows}


def summarize(
    records: Sequence[Record], baseline: str | None = None, axis: Literal["share", "keep"] = "share"
) -> Summary:
    """Return the figures of all records; the sweep may be unfinished.

    Args:
        records: the records of the sweep.
        baseline: a recipe with its budget, or a method, whose recipe with the same budget is the baseline; None for the
            full cache.
        axis: whether curves are over the share of a full 16-bit cache's bytes or, as in KVCompose, of entries.

    Raises:
        KeepsetError: the sweep does not have the baseline.
    """
    baseline = FULL if baseline is None else _known(baseline, records)
    tasks: dict[str, dict[str, dict[tuple[int, str], Record]]] = {}
    for record in records:
        tasks.setdefault(record.task, {}).setdefault(record.recipe, {})[record.seed, record.example] = record
    groups = _groups(tasks)
    rows: dict[str, dict[str, Row]] = {}
    for task, recipes in tasks.items():
        examples = {example for of_recipe in recipes.values() for _, example in of_recipe}
        against = {name: _against(recipes, name, baseline) for name in recipes}
        rows[task] = {name: row_of(of_recipe, against[name], examples) for name, of_recipe in recipes.items()}
    averages: list[Row] = []
    for group, members in groups.items():
        parts: dict[str, list[Row]] = {}
        for task in members:
            for recipe, row in rows[task].items():
                parts.setdefault(recipe, []).append(row)
        averages += sorted(
            (average(group, recipe_rows, len(members)) for recipe_rows in parts.values()), key=_best_first
        )
    together = {**{task: [task] for task in tasks}, **groups}
    trades: list[Trade] = []
    for name, members in together.items():
        trades += _trades(name, [(tasks[task], rows[task]) for task in members], axis)
    every = [row for by_recipe in rows.values() for row in sorted(by_recipe.values(), key=_best_first)]
    return Summary(baseline, conclusion(tasks), every, averages, trades, needle_maps(records))


def _best_first(row: Row) -> tuple[Any, ...]:
    """Return a sort key: the full cache, then by budget the best score first, and rows without a score last."""
    score = row.score
    return (row.recipe != FULL, *largest_first(row.requested), score is None, 0.0 if score is None else -score.value)


def split(records: Sequence[Record], fact: str) -> list[Record]:
    """Return the records with each value of a fact of the examples, such as `level`, as a separate task.

    A fact may also be one of an example's questions, such as `told`: then there is a score for each of its values, such
    as `told 1 to 5`. Records of examples without the fact are left out.

    Args:
        records: the records.
        fact: the name of the fact.

    Raises:
        KeepsetError: no example has the fact.
    """
    parts = [
        replace(record, task=f"{record.task}, {fact} {record.facts[fact]}")
        for record in records
        if fact in record.facts
    ]
    parts += [
        replace(record, task=f"{record.task}, {name}", metric=name)
        for record in records
        for name in record.scores
        if name.startswith(f"{fact} ")
    ]
    if not parts:
        names = {name for record in records for name in (*record.facts, *_facts_of_questions(record))}
        available = ", ".join(sorted(names)) or "nothing"
        raise KeepsetError(f"No example has the fact {fact}, so nothing can be split by it; there are: {available}.")
    return sorted(parts, key=lambda part: _natural(part.task))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which numbers in names are in their order."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"([0-9]+)", name)]


def _facts_of_questions(record: Record) -> list[str]:
    return [name.partition(" ")[0] for name in record.scores if " " in name]


def groups_of(task: str) -> list[str]:
    """Return the groups in which a task is averaged with tasks of the same length."""
    name, at, length = task.partition("@")
    return [f"{group}{at}{length}" for group, names in _GROUPS.items() if name in names]


def _groups(tasks: Iterable[str]) -> dict[str, list[str]]:
    """Return groups of two tasks or more; a part that equals its whole benchmark is left out."""
    members: dict[str, list[str]] = {}
    for task in tasks:
        for group in groups_of(task):
            members.setdefault(group, []).append(task)
    order = list(_GROUPS)
    by_members = {
        tuple(members[group]): group for group in sorted(members, key=lambda g: order.index(g.partition("@")[0]))
    }
    return {group: list(group_tasks) for group_tasks, group in by_members.items() if len(group_tasks) > 1}


def _known(baseline: str, records: Sequence[Record]) -> str:
    names = dict.fromkeys(name for record in records for name in (record.method, record.recipe))
    text = baseline if baseline in names else str(Recipe.parse(baseline))
    if text not in names:
        available = "; ".join(names) or "nothing yet"
        raise KeepsetError(f"{text!r} is not in the sweep, so nothing can be compared with it; there are: {available}.")
    return text


def _against(recipes: Mapping[str, Records], recipe: str, baseline: str) -> Records | None:
    """Return the baseline's records for a recipe; None if they would be its own, or there are none.

    Args:
        recipes: the records of all recipes.
        recipe: the recipe.
        baseline: a recipe, or a method, whose recipe with the same budget is taken.
    """
    if baseline in recipes:
        return recipes[baseline] if recipe != baseline else None
    requested = next(iter(recipes[recipe].values())).requested
    for name, records in recipes.items():
        first = next(iter(records.values()))
        if first.method == baseline and first.requested == requested and name != recipe:
            return records
    return None


def _trades(name: str, tasks: Sequence[tuple[Mapping[str, Records], Mapping[str, Row]]], axis: str) -> list[Trade]:
    """Return the curves of all methods that have two budgets or more; one budget makes no curve.

    Args:
        name: the task or group.
        tasks: records and rows of each of its tasks, by recipe.
        axis: the figure that curves are over.
    """
    if any(FULL not in rows or rows[FULL].score is None for _, rows in tasks):
        return []
    budgets: dict[str, list[str]] = {}
    for recipe, first in tasks[0][1].items():
        everywhere = all(recipe in rows and rows[recipe].score is not None for _, rows in tasks)
        if everywhere and recipe != FULL and first.requested is not None:
            budgets.setdefault(first.method, []).append(recipe)
    trades = (_trade(name, method, recipes, tasks, axis) for method, recipes in budgets.items() if len(recipes) > 1)
    return [trade for trade in trades if trade is not None]


def _trade(
    name: str,
    method: str,
    recipes: Sequence[str],
    tasks: Sequence[tuple[Mapping[str, Records], Mapping[str, Row]]],
    axis: str,
) -> Trade | None:
    shares = {recipe: fmean(rows[recipe].means[axis] or 0.0 for _, rows in tasks) for recipe in recipes}
    points = [FULL, *sorted(recipes, key=lambda recipe: -shares[recipe])]
    scores = [_scores([records[recipe] for recipe in points]) for records, _ in tasks]
    if not all(map(len, scores)):
        return None
    curve = Curve(np.array([1.0, *(shares[recipe] for recipe in points[1:])]), tuple(scores))
    smallest = float(curve.shares[-1])
    reaches = [
        Reach(tolerance, removed, removed.value >= 1 - smallest - 1e-9)
        for tolerance in TOLERANCES
        if (removed := compression(curve, tolerance)) is not None
    ]
    failed = sum(rows[recipe].failed for recipe in recipes for _, rows in tasks)
    return Trade(name, method, smallest, len(recipes), sum(map(len, scores)), failed, area(curve), reaches)


def _scores(points: Sequence[Records]) -> np.ndarray:
    """Return the scores of the examples that have all points, `[examples, points]`."""
    units = [unit for unit in points[0] if all(unit in records for records in points)]
    columns = [by_example((unit[1], records[unit].score) for unit in units) for records in points]
    return np.array(columns, np.float64).T.reshape(-1, len(points))


def needle_maps(records: Iterable[Record]) -> list[NeedleMap]:
    """Return the maps of all recipes on the tasks whose examples have a depth, from 0 to 1, and a length.

    An example counts once in its square, with the mean over its seeds. An error counts as no answer. A recipe that
    failed on all examples has no map.
    """
    by_recipe: dict[tuple[str, str], dict[tuple[int, float], list[tuple[str, float]]]] = {}
    lengths: dict[str, set[float]] = {}
    answered = set()
    for record in records:
        if (key := _place(record)) is not None:
            task = record.task.partition("@")[0]
            squares = by_recipe.setdefault((task, record.recipe), {})
            squares.setdefault(key, []).append((record.example, record.score))
            lengths.setdefault(task, set()).add(key[1])
            if record.error is None:
                answered.add((task, record.recipe))
    maps = []
    for (task, recipe), squares in by_recipe.items():
        if (task, recipe) in answered:
            columns = sorted(lengths[task])
            values = [[by_example(squares.get((part, length), [])) for length in columns] for part in range(PARTS)]
            scores = [[fmean(square) if square else None for square in line] for line in values]
            maps.append(NeedleMap(task, recipe, columns, scores, [[len(square) for square in line] for line in values]))
    return maps


def _place(record: Record) -> tuple[int, float] | None:
    depth, length = record.facts.get("depth"), record.facts.get("length")
    if isinstance(depth, str) or isinstance(length, str) or depth is None or length is None or not 0 <= depth <= 1:
        return None
    return min(math.floor(depth * PARTS), PARTS - 1), float(length)


def conclusion(tasks: Mapping[str, Mapping[str, Records]]) -> str:
    """Return a sentence about the cheapest of the best recipes; `tasks` has records by task and recipe.

    A recipe scores as well as the best one if the interval of their difference on the same examples includes zero.
    Recipes are compared on the mean of all tasks, and only if they have a score on each of them.
    """
    totals = _totals(tasks, None)
    full = totals.pop(FULL, None)
    if not totals:
        return "No recipe has a score on all tasks yet."
    rows = [*totals.values(), *([] if full is None else [full])]
    if any(row.examples < row.examples_of for row in rows):
        return "Nothing is concluded yet: not all recipes have run on all examples."
    examples = rows[0].examples
    if examples < LEAST_EXAMPLES:
        return f"Nothing can be concluded from {counted(examples)}: at least {LEAST_EXAMPLES} are needed."
    best = max(totals, key=lambda recipe: _score(totals[recipe]))
    differences = {recipe: row.difference for recipe, row in _totals(tasks, best).items()}
    tied = [
        recipe
        for recipe in totals
        if recipe == best or (to_best := differences[recipe]) is None or to_best.high is None or to_best.high >= 0
    ]
    chosen = min(tied, key=lambda recipe: (totals[recipe].means["share"] or 0.0, -_score(totals[recipe])))
    where = next(iter(tasks)) if len(tasks) == 1 else f"{len(tasks)} tasks"
    which = f"{chosen} scores best of {len(totals)} recipes"
    if len(tied) == len(totals) > 1:
        which = f"none of {len(totals)} recipes can be told from the best; the cheapest is {chosen}"
    elif len(tied) > 1:
        which = f"{len(tied)} of {len(totals)} recipes are a tie for the best; the cheapest of them is {chosen}"
    return (
        f"On {counted(examples)} of {where}, {which}: {_shown(totals[chosen])} with "
        f"{totals[chosen].means['share'] or 0.0:.1%} of a full 16-bit cache's bytes."
        + ("" if full is None else f" The full cache scores {_shown(full)}.")
    )


def counted(examples: int) -> str:
    """Return a number of examples in words."""
    return "1 example" if examples == 1 else f"{examples} examples"


def _totals(tasks: Mapping[str, Mapping[str, Records]], baseline: str | None) -> dict[str, Row]:
    """Return the mean over the tasks of every recipe that has a score on all of them."""
    rows: dict[str, list[Row]] = {}
    for recipes in tasks.values():
        examples = {example for records in recipes.values() for _, example in records}
        against = None if baseline is None else recipes.get(baseline)
        for recipe, records in recipes.items():
            rows.setdefault(recipe, []).append(row_of(records, against, examples))
    totals = {recipe: average("", recipe_rows, len(tasks)) for recipe, recipe_rows in rows.items()}
    return {recipe: total for recipe, total in totals.items() if total.score is not None}


def _score(total: Row) -> float:
    return 0.0 if total.score is None else total.score.value


def _shown(total: Row) -> str:
    score = total.score
    assert score is not None
    return f"{score.value:.1%} ({100 * (score.low or 0.0):.1f}..{100 * (score.high or 0.0):.1f})"
