"""The recipes that `keepset tune` tries: the catalogue, and what the best of it may be composed to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from keepset.allocate.composed import Composed
from keepset.allocate.uniform import Uniform
from keepset.errors import KeepsetError
from keepset.method import Allocator, Method
from keepset.recipe import Recipe
from keepset.registry import METHODS

EXTRA = (
    "received(statistic='mean'), received(statistic='rms'), received(statistic='rms', sinks=4, recent=32), "
    "pool(received, sinks=4, recent=32), pool(received(statistic='mean'), sinks=4, recent=32), "
    "pool(received(statistic='rms'), sinks=4, recent=32), kvcompose(structured=False), gvote(sinks=4, recent=32)"
)
"""Beside the catalogue's defaults: other statistics of a second pass, under an even budget and in one pool."""
COMPOSED = 3
"""So many of the best scorers get allocators."""


def catalogue() -> list[Recipe]:
    """Every scorer as its paper has it, and `EXTRA`; without a budget."""
    scorers = [name for name, kind in METHODS.items() if not issubclass(kind, Allocator)]
    return Recipe.parse_list(", ".join([*scorers, EXTRA]))


def with_budget(recipes: Iterable[Recipe], keep: int | float) -> tuple[list[Recipe], dict[Recipe, str]]:
    """These recipes with this `keep`, where they need one; and those that it does not suit, with the reason."""
    fitting, unfit = [], {}
    for recipe in recipes:
        try:
            fitting.append(recipe.with_keep(keep) if recipe.method.needs_budget else recipe)
        except KeepsetError as error:
            unfit[recipe] = str(error)
    return fitting, unfit


def compositions(best: Sequence[Recipe]) -> list[Recipe]:
    """Every allocator over the best `COMPOSED` of these recipes that can be divided, each another method, with budgets.

    `uniform` is left out: it changes nothing about a scorer that keeps the same number everywhere. So is what the
    catalogue has under a name of its own.
    """
    named = {Recipe(r.method.composition, r.budget) for r in catalogue() if isinstance(r.method, Composed)}
    composed: dict[type[Method], list[Recipe]] = {}
    for recipe in best:
        kind = type(recipe.method)
        if kind in composed or isinstance(recipe.method, Allocator) or not recipe.method.needs_budget:
            continue
        if found := _composed(recipe):
            composed[kind] = found
        if len(composed) == COMPOSED:
            break
    return [recipe for found in composed.values() for recipe in found if recipe.without_budget() not in named]


def composed_at_most() -> int:
    """How many compositions there can be."""
    return COMPOSED * len(_allocators())


def _composed(recipe: Recipe) -> list[Recipe]:
    found, budget, method = [], recipe.budget, recipe.method
    # What always stays is the composition's own choice, unless the recipe says otherwise than its method.
    sinks = None if budget.sinks == method.sinks else budget.sinks
    recent = None if budget.recent == method.recent else budget.recent
    for kind in _allocators():
        with suppress(KeepsetError):
            found.append(Recipe.of(kind(method), keep=budget.keep, sinks=sinks, recent=recent))
    return found


def _allocators() -> list[type[Allocator]]:
    return [kind for kind in METHODS.values() if issubclass(kind, Allocator) and kind is not Uniform]
