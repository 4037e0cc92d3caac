"""The recipes that `keepset tune` tries: the catalogue, and what the best of it may be composed to."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from keepset.allocators.int8 import Int8
from keepset.allocators.presets import Preset
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
    "match(glance), match(reread), int8(pool(prompt_queries)), int8(match(reread))"
)
"""Beside the catalogue's defaults: other statistics of a second pass, under an even budget and in one pool; what stays
fitted to all that was there, and more of it in 8 bits."""
COMPOSED = 3
"""So many of the best scorers get allocators."""


def scorers() -> list[Recipe]:
    """Every scorer as its paper has it, and `EXTRA`; without a budget."""
    names = [name for name, kind in METHODS.items() if not issubclass(kind, Allocator)]
    return Recipe.parse_list(", ".join([*names, EXTRA]))


def with_budget(
    recipes: Iterable[Recipe], keep: int | float, in_8_bits: float
) -> tuple[list[Recipe], dict[Recipe, str]]:
    """These recipes with this `keep`, where they need one; and those that it does not suit, with the reason.

    Of entries in 8 bits, `in_8_bits` weigh as much as a whole one: so many times more of them are kept.
    """
    more = min(1.0, round(keep * in_8_bits, 3)) if isinstance(keep, float) else int(keep * in_8_bits)
    fitting, unfit = [], {}
    for recipe in recipes:
        try:
            own = more if isinstance(recipe.method, Int8) else keep
            fitting.append(recipe.with_keep(own) if recipe.method.traits.needs_budget else recipe)
        except KeepsetError as error:
            unfit[recipe] = str(error)
    return fitting, unfit


def compositions(best: Sequence[Recipe]) -> list[Recipe]:
    """Every allocator over the `COMPOSED` best scorers, alone or inside these recipes, each another method.

    Left out are scorers that look at nothing, which no allocator can divide anything by; `uniform`, which changes
    nothing about a scorer that keeps the same number everywhere; what the catalogue has under a name of its own; and
    what is in 8 bits, whose budget is another.
    """
    named = {Recipe(r.method.composition, r.budget) for r in scorers() if isinstance(r.method, Preset)}
    composed: dict[type[Method], list[Recipe]] = {}
    for recipe in best:
        if isinstance(recipe.method, Int8):
            continue
        scorer = _scorer(recipe.method)
        if type(scorer) in composed or not scorer.traits.needs_budget or isinstance(scorer, StreamingLLM | Random):
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
    sinks = None if budget.sinks == recipe.method.traits.sinks else budget.sinks
    recent = None if budget.recent == recipe.method.traits.recent else budget.recent
    for kind in _allocators():
        with suppress(KeepsetError):
            recipes.append(Recipe.of(kind(scorer), keep=budget.keep, sinks=sinks, recent=recent))
    return recipes


def _allocators() -> list[type[Allocator]]:
    return [kind for kind in METHODS.values() if issubclass(kind, Allocator) and kind is not Uniform and not kind.stage]
