"""`Candidate`: what is compared, every recipe under every budget, beside the full cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepset.bench.record import FULL
from keepset.errors import KeepsetError
from keepset.recipe import Recipe, check_schedule


@dataclass(frozen=True)
class Candidate:
    """One recipe with its budget, or the full cache, whose text and method are `FULL`.

    The recipe is None for the full cache, and where `error` says why recipe and budget do not go together; the method
    is the recipe without its budget. `requested` is the budget that was asked for: None where the method decides, 1.0
    for the full cache.
    """

    recipe: Recipe | None
    text: str
    method: str
    requested: int | float | None
    error: str | None = None

    @classmethod
    def of(
        cls, recipe: Recipe, keep: int | float | None, every: int | None, always: tuple[int, int] = (0, 0)
    ) -> Candidate:
        """The recipe with this budget and interval, where they are said; one that they do not suit has an error.

        Args:
            recipe: the method, with what else the recipe says.
            keep: see `Budget`.
            every: see `Schedule`.
            always: how many of the first and of the newest tokens stay at least; see `Recipe.with_always`.
        """
        requested = recipe.budget.keep if keep is None else keep
        method = recipe.without_budget()
        try:
            if every is not None:
                method = replace(method, schedule=replace(recipe.schedule, every=every))
            method = method.with_always(*always)
            budgeted = method if requested is None else method.with_keep(requested)
            check_schedule(budgeted.require_budget())
        except KeepsetError as error:
            return cls(None, method.text(requested), str(method), requested, str(error))
        return cls(budgeted, str(budgeted), str(method), requested)


def candidates(
    recipes: Sequence[Recipe],
    keeps: Sequence[int | float],
    every: int | None = None,
    always: tuple[int, int] = (0, 0),
) -> list[Candidate]:
    """The full cache, then all of the `grid`."""
    return [Candidate(None, FULL, FULL, 1.0), *grid(recipes, keeps, every, always)]


def grid(
    recipes: Sequence[Recipe],
    keeps: Sequence[int | float],
    every: int | None = None,
    always: tuple[int, int] = (0, 0),
) -> list[Candidate]:
    """Every recipe under every budget; what is there already does not come again.

    A recipe that has a budget, or whose method needs none, comes once with the budget that it has. `every` is for
    recipes that do not say themselves after how many tokens to compress again while decoding, `always` for those that
    do not say themselves how many of the first and of the newest tokens always stay.
    """
    unique: dict[str, Candidate] = {}
    for recipe in recipes:
        interval = None if recipe.schedule.every is not None else every
        fixed = recipe.budget.keep is not None or not recipe.method.traits.needs_budget or not keeps
        for keep in [None] if fixed else keeps:
            candidate = Candidate.of(recipe, keep, interval, always)
            unique.setdefault(candidate.text, candidate)
    return list(unique.values())
