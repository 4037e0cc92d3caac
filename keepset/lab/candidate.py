"""`Candidate`: one recipe under one budget, or the full cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepset.core.budget import Budget
from keepset.errors import KeepsetError
from keepset.lab.record import FULL
from keepset.recipe import Recipe, check_schedule


@dataclass(frozen=True)
class Candidate:
    """One recipe with its budget, or the full cache.

    Attributes:
        recipe: the recipe; None for the full cache, and if the budget does not suit the recipe (`error` says why).
        text: the recipe's text with its budget; `FULL` for the full cache.
        method: the recipe's text without its budget; `FULL` for the full cache.
        requested: the requested budget, such as `bytes=0.25` or `keep=512`; None if the method decides, and for the
            full cache.
    """

    recipe: Recipe | None
    text: str
    method: str
    requested: str | None
    error: str | None = None

    @classmethod
    def of(
        cls, recipe: Recipe, budget: Budget | None, every: int | None, always: tuple[int, int] = (0, 0)
    ) -> Candidate:
        """Return the candidate with this budget and interval; it has an error if they do not suit the recipe.

        Args:
            recipe: the recipe, whose own options win.
            budget: the budget; None for the recipe's own.
            every: tokens between two events; None for the recipe's own.
            always: least numbers of the first and of the newest tokens that stay; see `Recipe.with_always`.
        """
        budget = budget or recipe.budget
        method, requested = recipe.with_budget(), text_of(budget)
        try:
            if every is not None:
                method = replace(method, schedule=replace(recipe.schedule, every=every))
            method = method.with_always(*always)
            budgeted = method.with_budget(budget.keep, budget.bytes)
            check_schedule(budgeted.require_budget())
        except KeepsetError as error:
            return cls(None, method.text(budget.keep, budget.bytes), str(method), requested, str(error))
        return cls(budgeted, str(budgeted), str(method), requested)


FULL_CACHE = Candidate(None, FULL, FULL, None)
"""The cache that drops nothing."""


def text_of(budget: Budget) -> str | None:
    """Return a budget's size as in a recipe, such as `bytes=0.25`; None if it has none."""
    named = {"keep": budget.keep, "bytes": budget.bytes}
    return next((f"{name}={value!r}" for name, value in named.items() if value is not None), None)


def candidates(
    recipes: Sequence[Recipe], budgets: Sequence[Budget], every: int | None = None, always: tuple[int, int] = (0, 0)
) -> list[Candidate]:
    """Return the full cache, then the `grid` of all recipes under all budgets.

    Args:
        recipes, budgets, every, always: see `grid`.
    """
    return [FULL_CACHE, *grid(recipes, budgets, every, always)]


def grid(
    recipes: Sequence[Recipe], budgets: Sequence[Budget], every: int | None = None, always: tuple[int, int] = (0, 0)
) -> list[Candidate]:
    """Return every recipe under every budget, each once.

    Args:
        recipes: the recipes. One that has a budget, or whose method needs none, comes once with its own budget.
        budgets: the budgets of the others.
        every: tokens between two events of recipes that do not say it; None for none.
        always: how many of the first and of the newest tokens stay; see `Recipe.with_always`.
    """
    unique: dict[str, Candidate] = {}
    for recipe in recipes:
        interval = None if recipe.schedule.every is not None else every
        fixed = recipe.budget.is_given or not recipe.method.traits.needs_budget or not budgets
        for budget in [None] if fixed else budgets:
            candidate = Candidate.of(recipe, budget, interval, always)
            unique.setdefault(candidate.text, candidate)
    return list(unique.values())
