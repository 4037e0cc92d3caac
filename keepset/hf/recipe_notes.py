"""Sentences about recipes for people: what always stays of a prompt, and what that leaves to choose."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepset.core.features.queries import WindowAttention
from keepset.hf.model_support import head_dim_of
from keepset.recipe import Recipe

logger = logging.getLogger(__name__)

_warned: dict[tuple[str, str], str] = {}
"""What was said in the log, by recipe and kind."""


def what_stays(recipe: Recipe, model: PreTrainedModel, length: int) -> str | None:
    """Return that a prompt is short, or that what always stays of it fills or exceeds the budget.

    Args:
        recipe: the recipe.
        model: the model.
        length: tokens of the prompt.

    Returns:
        A sentence; None if the budget decides.
    """
    budget = recipe.budget
    stays, always = budget.sinks + budget.recent, _always(recipe)
    if length < budget.short:
        return f"The prompt stays whole: it has {length} tokens, fewer than short={budget.short}."
    if budget.keep == 1.0 or budget.recent_extra:
        return None
    if stays >= length:
        return f"The prompt stays whole: it has {length} tokens, and {always}."
    share = recipe.budget_of_sizes([(head_dim_of(model),) * 2]).keep
    if (sentence := _beyond_budget(recipe, share, length)) is not None:
        return sentence
    if share is not None and stays == (math.floor(share * length) if isinstance(share, float) else share):
        return nothing_chosen(recipe)
    return None


def _beyond_budget(recipe: Recipe, share: float | None, length: int) -> str | None:
    """Return that more stays of a prompt than a share of it; None if the budget decides, or is no share."""
    if not isinstance(share, float):
        return None
    budget = replace(recipe.budget, keep=share, bytes=None)
    if not budget.is_exceeded(length):
        return None
    stays = min(budget.sinks + budget.recent, length)
    return f"More than the budget stays: {_always(recipe)} of {length} tokens ({stays / length:.0%})."


def warn_beyond_budget(recipe: Recipe, share: float | None, length: int) -> None:
    """Say in the log that more stays of a prompt than a share of it; once for each recipe.

    Args:
        recipe: the recipe.
        share: its budget in entries.
        length: tokens of the prompt.
    """
    if (sentence := _beyond_budget(recipe, share, length)) is not None:
        _warn_once(recipe, "budget", sentence)


def warn_without_bos(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Say in the log that a text has first tokens to keep, and none that begins texts; once for each recipe.

    Args:
        recipe: the recipe.
        tokenizer: the model's tokenizer.
        ids: the text's tokens.
    """
    if not recipe.budget.sinks:
        return
    begins = tokenizer.bos_token_id
    if begins is None or list(ids[:1]) == [begins]:
        return
    if tokenizer("")["input_ids"][:1] == [begins]:  # else its model knows texts without it
        _warn_once(
            recipe,
            "bos",
            f"The text does not begin with {tokenizer.bos_token}, as this model's texts do: without it the first "
            f"{recipe.budget.sinks} tokens, which {recipe} always keeps, are hardly attended to, and answers may be "
            "worse.",
        )


def _warn_once(recipe: Recipe, kind: str, sentence: str) -> None:
    key = str(recipe), kind
    if key not in _warned:
        _warned[key] = sentence
        logger.warning("keepset: %s", sentence)  # a warning is shown even if logging is not set up


def was_said(sentence: str) -> bool:
    """Return whether a sentence was said in the log."""
    return sentence in _warned.values()


def asks_the_end(recipe: Recipe, advised: str) -> str | None:
    """Return that a recipe chooses by the newest tokens of a text, if it does, for a text that is asked about later.

    Args:
        recipe: the recipe.
        advised: a recipe that does not.
    """
    windows = recipe.method.traits.needs.of(WindowAttention)
    if not windows:
        return None
    count = max(window.window for window in windows)
    return (
        f"{recipe} keeps what the newest {count} tokens of the text attend to, which are no question: facts that are "
        f"asked for later are mostly dropped; {advised} looks at all of the text."
    )


def nothing_chosen(recipe: Recipe) -> str:
    """Return that what always stays is the whole budget of a recipe."""
    return f"Nothing is chosen: {_always(recipe)}, which is the whole budget. Give a larger one."


def _always(recipe: Recipe) -> str:
    """Return which tokens a recipe always keeps, as the beginning of a sentence."""
    counts = ("first", recipe.budget.sinks), ("newest", recipe.budget.recent)
    return f"{recipe} always keeps " + " and ".join(f"the {which} {count}" for which, count in counts if count)
