"""The recipes that `keepset tune` tries: the catalogue, and what the best of it may be composed to."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from keepset.allocators.preset import Preset
from keepset.allocators.uniform import Uniform
from keepset.core.method import Allocator, Method
from keepset.errors import KeepsetError
from keepset.methods.random import Random
from keepset.methods.streaming_llm import StreamingLLM
from keepset.recipe import Recipe
from keepset.registry import METHODS

EXTRA = (
    "second_pass(statistic='mean'), second_pass(statistic='rms'), second_pass(statistic='rms', sinks=4, recent=32), "
    "pool(second_pass, sinks=4, recent=32), pool(second_pass(statistic='mean'), sinks=4, recent=32), "
    "pool(second_pass(statistic='rms'), sinks=4, recent=32), kvcompose(structured=False), gvote(sinks=4, recent=32), "
    "match(glance), match(reread)"
)
"""Beside the catalogue's defaults: other statistics of a second pass, under an even budget and in one pool; and what
stays fitted to all that was there."""
COMPOSED = 3
"""So many of the best scorers get allocators."""


def scorers() -> list[Recipe]:
    """Every scorer as its paper has it, and `EXTRA`; without a budget."""
    names = [name for name, kind in METHODS.items() if not issubclass(kind, Allocator)]
    return Recipe.parse_list(", ".join([*names, EXTRA]))


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
    """Every allocator over the `COMPOSED` best scorers, alone or inside these recipes, each another method.

    Left out are scorers that look at nothing, which no allocator can divide anything by; `uniform`, which changes
    nothing about a scorer that keeps the same number everywhere; and what the catalogue has under a name of its own.
    """
    named = {Recipe(r.method.composition, r.budget) for r in scorers() if isinstance(r.method, Preset)}
    composed: dict[type[Method], list[Recipe]] = {}
    for recipe in best:
        scorer = _scorer(recipe.method)
        if type(scorer) in composed or not scorer.needs_budget or isinstance(scorer, StreamingLLM | Random):
            continue
        if recipes := _composed(scorer, recipe):
            composed[type(scorer)] = recipes
        if len(composed) == COMPOSED:
            break
    return [recipe for recipes in composed.values() for recipe in recipes if recipe.without_budget() not in named]


def composed_at_most() -> int:
    """How many compositions there can be."""
    return COMPOSED * len(_allocators())


def _scorer(method: Method) -> Method:
    while isinstance(method, Preset | Allocator):
        method = method.composition if isinstance(method, Preset) else method.scorer
    return method


def _composed(scorer: Method, recipe: Recipe) -> list[Recipe]:
    recipes, budget = [], recipe.budget
    # What always stays is the composition's own choice, unless the recipe says otherwise than its method.
    sinks = None if budget.sinks == recipe.method.sinks else budget.sinks
    recent = None if budget.recent == recipe.method.recent else budget.recent
    for kind in _allocators():
        with suppress(KeepsetError):
            recipes.append(Recipe.of(kind(scorer), keep=budget.keep, sinks=sinks, recent=recent))
    return recipes


def _allocators() -> list[type[Allocator]]:
    return [kind for kind in METHODS.values() if issubclass(kind, Allocator) and kind is not Uniform and not kind.stage]
