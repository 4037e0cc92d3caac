"""The recipes that `keepset tune` tries: the catalogue, and compositions of the best of it."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from keepset.allocators.presets import Preset
from keepset.allocators.quantized import Quantized
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
    "match(glance), match(reread), quantized(pool(prompt_queries)), quantized(match(reread))"
)
"""Recipes beside the catalogue's defaults: other statistics of a second pass, under an even budget and in one pool;
values fitted to what was dropped; and more entries in 8 bits."""
COMPOSED = 3
"""Number of the best scorers that are combined with allocators."""


def scorers() -> list[Recipe]:
    """Return every scorer with its paper's defaults, and `EXTRA`, without a budget."""
    names = [name for name, kind in METHODS.items() if not issubclass(kind, Allocator)]
    return Recipe.parse_list(", ".join([*names, EXTRA]))


def with_budget(
    recipes: Iterable[Recipe], keep: int | float, in_8_bits: float
) -> tuple[list[Recipe], dict[Recipe, str]]:
    """Return the recipes with a budget, and the recipes that it does not suit with the reason.

    Args:
        recipes: recipes without a budget.
        keep: the budget, for recipes that need one.
        in_8_bits: how many 8-bit entries take as many bytes as a whole one; recipes in 8 bits keep that many times
            more.
    """
    more = min(1.0, round(keep * in_8_bits, 3)) if isinstance(keep, float) else int(keep * in_8_bits)
    fitting, unfit = [], {}
    for recipe in recipes:
        try:
            own = more if isinstance(recipe.method, Quantized) else keep
            fitting.append(recipe.with_keep(own) if recipe.method.traits.needs_budget else recipe)
        except KeepsetError as error:
            unfit[recipe] = str(error)
    return fitting, unfit


def compositions(best: Sequence[Recipe]) -> list[Recipe]:
    """Return every allocator over the `COMPOSED` best scorers, each of another method, of recipes in order.

    Left out are scorers that look at nothing, by which no allocator can divide; `uniform`, which does not change a
    scorer that keeps the same number everywhere; compositions that the catalogue has under a name of their own; and
    recipes in 8 bits, whose budget differs.
    """
    named = {Recipe(r.method.composition, r.budget) for r in scorers() if isinstance(r.method, Preset)}
    composed: dict[type[Method], list[Recipe]] = {}
    for recipe in best:
        if isinstance(recipe.method, Quantized):
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
    """Return the largest number of compositions."""
    return COMPOSED * len(_allocators())


def _scorer(method: Method) -> Method:
    while isinstance(method, Preset | Allocator):
        method = method.composition if isinstance(method, Preset) else method.scorer
    return method


def _composed(scorer: Method, recipe: Recipe) -> list[Recipe]:
    recipes, budget = [], recipe.budget
    # The composition chooses what always stays, unless the recipe differs from its method.
    sinks = None if budget.sinks == recipe.method.traits.sinks else budget.sinks
    recent = None if budget.recent == recipe.method.traits.recent else budget.recent
    for kind in _allocators():
        with suppress(KeepsetError):
            recipes.append(Recipe.of(kind(scorer), keep=budget.keep, sinks=sinks, recent=recent))
    return recipes


def _allocators() -> list[type[Allocator]]:
    return [kind for kind in METHODS.values() if issubclass(kind, Allocator) and kind is not Uniform and not kind.stage]
