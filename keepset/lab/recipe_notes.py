"""Sentences about recipes for people: what always stays of a prompt, and what that leaves to choose."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from keepset.recipe import Recipe


def what_stays(recipe: Recipe, model: PreTrainedModel, length: int) -> str | None:
    """Return that a prompt is short, or that what always stays of it fills or exceeds the budget.

    Args:
        recipe: the recipe.
        model: the model.
        length: tokens of the prompt.

    Returns:
        A sentence; None if the budget decides.
    """
    from keepset.hf.model_support import head_dim_of

    budget = recipe.budget
    stays, always = budget.sinks + budget.recent, _always(recipe)
    if length < budget.short:
        return f"The prompt stays whole: it has {length} tokens, fewer than short={budget.short}."
    if budget.keep == 1.0 or budget.recent_extra:
        return None
    if stays >= length:
        return f"The prompt stays whole: it has {length} tokens, and {always}."
    share = recipe.budget_of_sizes([(head_dim_of(model),) * 2]).keep
    if isinstance(share, float) and stays > math.floor(share * length):
        return f"More than the budget stays: {always} of {length} tokens ({stays / length:.0%})."
    if share is not None and stays == (math.floor(share * length) if isinstance(share, float) else share):
        return nothing_chosen(recipe)
    return None


def nothing_chosen(recipe: Recipe) -> str:
    """Return that what always stays is the whole budget of a recipe."""
    return f"Nothing is chosen: {_always(recipe)}, which is the whole budget. Give a larger one."


def _always(recipe: Recipe) -> str:
    """Return which tokens a recipe always keeps, as the beginning of a sentence."""
    counts = ("first", recipe.budget.sinks), ("newest", recipe.budget.recent)
    return f"{recipe} always keeps " + " and ".join(f"the {which} {count}" for which, count in counts if count)
