"""Notes on recipes: what to write instead, what they lack, and what always stays of a prompt."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from keepset.lab.cli.console import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from keepset.recipe import Recipe


def say_advice(recipes: Iterable[Recipe]) -> None:
    """Note what to write instead of recipes whose bare defaults are known to do badly."""
    for recipe in recipes:
        if recipe.advice:
            note(recipe.advice)


def say_networks(model: PreTrainedModel, called: str) -> None:
    """Note how networks are made for a model that has none."""
    from keepset.defaults import has_networks, lack_of_networks

    if not has_networks(model.config.name_or_path or ""):
        sentence = lack_of_networks(called)
        note(sentence[0].upper() + sentence[1:])


def say_always(recipe: Recipe, model: PreTrainedModel, length: int) -> None:
    """Note that a prompt of `length` tokens is short, or that what always stays of it fills or exceeds the budget."""
    from keepset.hf.model_support import head_dim_of

    budget = recipe.budget
    stays, always = budget.sinks + budget.recent, _always(recipe)
    if length < budget.short:
        note(f"The prompt stays whole: it has {length} tokens, fewer than short={budget.short}.")
        return
    if budget.keep == 1.0 or budget.recent_extra:
        return
    if stays >= length:
        note(f"The prompt stays whole: it has {length} tokens, and {always}.")
        return
    share = recipe.budget_of_sizes([(head_dim_of(model),) * 2]).keep
    if isinstance(share, float) and stays > math.floor(share * length):
        note(f"More than the budget stays: {always} of {length} tokens ({stays / length:.0%}).")
    elif share is not None and stays == (math.floor(share * length) if isinstance(share, float) else share):
        note(_nothing_chosen(recipe))


def say_of_all_prompts(recipe: Recipe) -> None:
    """Note the same as `say_always` and `note_short`, for a server, whose prompts are not known yet."""
    from keepset.defaults import SHORT

    budget = recipe.budget
    if budget.keep == budget.sinks + budget.recent and not budget.recent_extra:
        note(_nothing_chosen(recipe))
    if budget.short:
        note(f"Prompts of fewer than {budget.short} tokens stay whole.")
    elif budget.bytes is not None or (isinstance(budget.keep, float) and budget.keep < 1):
        note(f"Short prompts are compressed too, though they can spare little: short={SHORT} leaves them whole.")


def _always(recipe: Recipe) -> str:
    """Return which tokens a recipe always keeps, as the beginning of a sentence."""
    both = ("first", recipe.budget.sinks), ("newest", recipe.budget.recent)
    return f"{recipe} always keeps " + " and ".join(f"the {which} {count}" for which, count in both if count)


def _nothing_chosen(recipe: Recipe) -> str:
    return f"Nothing is chosen: {_always(recipe)}, which is the whole budget. Give a larger one."
