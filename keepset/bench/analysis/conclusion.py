"""`conclusion`: the result of a sweep as a sentence that claims no more than its examples allow."""

from __future__ import annotations

from collections.abc import Mapping

from keepset.bench.analysis.rows import Records, Row, average, row_of
from keepset.bench.record import FULL

LEAST_EXAMPLES = 10
"""The fewest examples that allow a conclusion."""


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
    totals = {recipe: average("", own, len(tasks)) for recipe, own in rows.items()}
    return {recipe: total for recipe, total in totals.items() if total.score is not None}


def _score(total: Row) -> float:
    return 0.0 if total.score is None else total.score.value


def _shown(total: Row) -> str:
    score = total.score
    assert score is not None
    return f"{score.value:.1%} ({100 * (score.low or 0.0):.1f}..{100 * (score.high or 0.0):.1f})"
