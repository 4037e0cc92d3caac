"""`conclusion`: what a sweep shows, in a sentence that claims no more than its examples allow."""

from __future__ import annotations

from collections.abc import Mapping

from keepset.bench.analysis.rows import Figure, Records, Row, average, row_of
from keepset.bench.record import FULL

LEAST_EXAMPLES = 10
"""Examples below which nothing is concluded."""


def conclusion(tasks: Mapping[str, Mapping[str, Records]]) -> str:
    """Return the cheapest of the recipes that score best, and on how many examples; `tasks` are by task and recipe.

    A recipe scores as well as the best one if the interval of their difference on the same examples holds zero.
    Recipes are compared on the mean of all tasks, and only if they have a score on each of them.
    """
    totals = _totals(tasks, None)
    if not any(recipe != FULL for recipe in totals):
        return "No recipe has a score on all tasks yet."
    if any(row.examples < row.examples_of for row in totals.values()):
        return "Nothing is concluded yet: not all recipes have run on all examples."
    examples = next(iter(totals.values())).examples
    if examples < LEAST_EXAMPLES:
        return f"Nothing can be concluded from {counted(examples)}: at least {LEAST_EXAMPLES} are needed."
    best = max((recipe for recipe in totals if recipe != FULL), key=lambda recipe: _score(totals[recipe]).value)
    against = _totals(tasks, best)
    full = totals.pop(FULL, None)
    tied = [recipe for recipe in totals if recipe == best or _holds_zero(against[recipe].difference)]
    chosen = min(tied, key=lambda recipe: (totals[recipe].means["share"] or 0.0, -_score(totals[recipe]).value))
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
    totals = {recipe: average("", own, len(tasks)) for recipe, own in rows.items() if len(own) == len(tasks)}
    return {recipe: total for recipe, total in totals.items() if total.score is not None}


def _score(total: Row) -> Figure:
    assert total.score is not None
    return total.score


def _holds_zero(difference: Figure | None) -> bool:
    return difference is None or difference.high is None or difference.high >= 0


def _shown(total: Row) -> str:
    score = _score(total)
    return f"{score.value:.1%} ({100 * (score.low or 0.0):.1f}..{100 * (score.high or 0.0):.1f})"
