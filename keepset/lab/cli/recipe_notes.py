"""Notes on recipes: what to write instead, what they lack, and what always stays of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from keepset.lab.cli.console import note
from keepset.lab.recipe_notes import nothing_chosen, what_stays

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from keepset.recipe import Recipe


def say_advice(recipes: Iterable[Recipe]) -> None:
    """Note what to write instead of recipes whose bare defaults are known to do badly."""
    for recipe in recipes:
        if recipe.advice:
            note(recipe.advice)


def say_networks(model: PreTrainedModel, called: str) -> None:
    """Note how networks are made for a model that has none.

    Args:
        model: the model.
        called: the model's name in the note.
    """
    from keepset.defaults import has_networks, lack_of_networks

    if not has_networks(model.config.name_or_path or ""):
        sentence = lack_of_networks(called)
        note(sentence[0].upper() + sentence[1:])


def say_always(recipe: Recipe, model: PreTrainedModel, length: int) -> None:
    """Note that a prompt is short, or that what always stays of it fills or exceeds the budget.

    Args:
        recipe: the recipe.
        model: the model.
        length: tokens of the prompt.
    """
    if (sentence := what_stays(recipe, model, length)) is not None:
        note(sentence)


def say_of_all_prompts(recipe: Recipe) -> None:
    """Note the same as `say_always` and `note_short`, for a server, whose prompts are not known yet."""
    from keepset.defaults import SHORT

    budget = recipe.budget
    if budget.keep == budget.sinks + budget.recent and not budget.recent_extra:
        note(nothing_chosen(recipe))
    if budget.short:
        note(f"Prompts of fewer than {budget.short} tokens stay whole.")
    elif budget.bytes is not None or (isinstance(budget.keep, float) and budget.keep < 1):
        note(f"Short prompts are compressed too, though they can spare little: short={SHORT} leaves them whole.")
