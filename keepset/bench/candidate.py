"""`Candidate`: one recipe under one budget, or the full cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepset.bench.record import FULL
from keepset.errors import KeepsetError
from keepset.recipe import Recipe, check_schedule


@dataclass(frozen=True)
class Candidate:
    """One recipe with its budget, or the full cache.

    Attributes:
        recipe: the recipe; None for the full cache, and if recipe and budget do not go together.
        text: the recipe's text with its budget; `FULL` for the full cache.
        method: the recipe's text without its budget; `FULL` for the full cache.
        requested: the budget that was asked for; None if the method decides, 1.0 for the full cache.
        error: why recipe and budget do not go together.
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
        """Return the recipe with this budget and interval; a recipe that they do not suit has an error.

        Args:
            recipe: the method, and what else the recipe says.
            keep: the budget; None for the recipe's own.
            every: tokens between two events; None for the recipe's own.
            always: least numbers of the first and of the newest tokens that stay; see `Recipe.with_always`.
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
    """Return the full cache, then the `grid` of all recipes under all budgets."""
    return [Candidate(None, FULL, FULL, 1.0), *grid(recipes, keeps, every, always)]


def grid(
    recipes: Sequence[Recipe],
    keeps: Sequence[int | float],
    every: int | None = None,
    always: tuple[int, int] = (0, 0),
) -> list[Candidate]:
    """Return every recipe under every budget, each once.

    A recipe that has a budget, or whose method needs none, comes once with its own budget.

    Args:
        recipes: the recipes.
        keeps: the budgets.
        every: tokens between two events, for recipes that do not say it.
        always: numbers of the first and of the newest tokens that always stay, for recipes that do not say it.
    """
    unique: dict[str, Candidate] = {}
    for recipe in recipes:
        interval = None if recipe.schedule.every is not None else every
        fixed = recipe.budget.keep is not None or not recipe.method.traits.needs_budget or not keeps
        for keep in [None] if fixed else keeps:
            candidate = Candidate.of(recipe, keep, interval, always)
            unique.setdefault(candidate.text, candidate)
    return list(unique.values())
