"""The recipes that `keepset tune` tries: the catalogue, and compositions of the best of it."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from keepset.allocators.presets import Preset
from keepset.allocators.uniform import Uniform
from keepset.core.budget import Budget
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
    "match(glance), match(reread), quantized(pool(prompt_queries)), quantized(match(reread)), "
    "quantized(match(pool(distilled)))"
)
"""Recipes beside the catalogue's defaults: other statistics of a second pass, under an even budget and in one pool;
values fitted to what was dropped; and more entries in 8 bits."""
COMPOSED = 3
"""Number of the best scorers that are combined with allocators."""


def scorers() -> list[Recipe]:
    """Return every scorer with its paper's defaults, and `EXTRA`, without a budget."""
    names = [name for name, kind in METHODS.items() if not issubclass(kind, Allocator)]
    return Recipe.parse_list(", ".join([*names, EXTRA]))


def with_budget(recipes: Iterable[Recipe], budget: Budget) -> tuple[list[Recipe], dict[Recipe, str]]:
    """Return the recipes, with a budget if they need one, and the unsuitable recipes with the reason."""
    fitting, unfit = [], {}
    for recipe in recipes:
        try:
            needs = recipe.method.traits.needs_budget
            fitting.append(recipe.with_budget(budget.keep, budget.bytes) if needs else recipe)
        except KeepsetError as error:
            unfit[recipe] = str(error)
    return fitting, unfit


def compositions(best: Sequence[Recipe]) -> list[Recipe]:
    """Return every allocator over the `COMPOSED` best scorers of different methods, given recipes in order.

    Left out are scorers without inputs, by which no allocator can divide; `uniform`, which does not change a scorer
    that keeps the same number everywhere; and compositions that have their own name in the catalogue.
    """
    named = {Recipe(r.method.composition, r.budget) for r in scorers() if isinstance(r.method, Preset)}
    composed: dict[type[Method], list[Recipe]] = {}
    for recipe in best:
        scorer = _scorer(recipe.method)
        if type(scorer) in composed or not scorer.traits.needs_budget or isinstance(scorer, StreamingLLM | Random):
            continue
        if recipes := _composed(scorer, recipe):
            composed[type(scorer)] = recipes
        if len(composed) == COMPOSED:
            break
    return [recipe for recipes in composed.values() for recipe in recipes if recipe.with_budget() not in named]


def composed_at_most() -> int:
    """Return the largest number of compositions."""
    return COMPOSED * len(_allocators())


def _scorer(method: Method) -> Method:
    while isinstance(method, Preset | Allocator):
        method = method.composition if isinstance(method, Preset) else method.scorer
    return method


def _composed(scorer: Method, recipe: Recipe) -> list[Recipe]:
    recipes, budget = [], recipe.budget
    # The composition chooses which tokens always stay, unless the recipe differs from its method.
    sinks = None if budget.sinks == recipe.method.traits.sinks else budget.sinks
    recent = None if budget.recent == recipe.method.traits.recent else budget.recent
    for kind in _allocators():
        with suppress(KeepsetError):
            made = Recipe.of(kind(scorer), keep=budget.keep, bytes=budget.bytes, sinks=sinks, recent=recent)
            recipes.append(made)
    return recipes


def _allocators() -> list[type[Allocator]]:
    return [kind for kind in METHODS.values() if issubclass(kind, Allocator) and kind is not Uniform and not kind.stage]
