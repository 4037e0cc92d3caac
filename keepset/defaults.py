"""The default recipes of commands, of `Cache`, of a vLLM server and of the playground.

Each keeps a quarter of a full 16-bit cache's bytes, and leaves prompts of fewer than `SHORT` tokens whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from keepset.recipe import Recipe

NETWORKS = "quantized(match(pool(distilled)), bytes=0.25, short=256)"
"""The default for a model whose statistics hold the networks of `distilled`. It takes one pass."""
ANSWERED_AT_ONCE = "quantized(pool(prompt_queries), bytes=0.25, short=256)"
"""The default for other models, and a prompt that is answered at once. It takes one pass."""
ASKED_LATER = "quantized(match(reread), bytes=0.25, short=256)"
"""The default for other models, and a text that is asked about later. It takes two passes."""

CHATTED_NETWORKS = "quantized(match(pool(distilled)), bytes=0.25, short=256, turns=True)"
"""The default for conversations, if there are networks for the model."""
CHATTED = "quantized(pool(snapkv), bytes=0.25, short=256, turns=True)"
"""The default for conversations with other models."""

SHORT = 256
"""The tokens below which a prompt is short: most of its entries are needed, so no default compresses it."""
COMPARED = ("reread", "glance", "snapkv", "adakv(expected_attention)", "kvzip", "streaming_llm", "random")
"""Recipes without budgets that stand beside the defaults in comparisons and in the playground's list."""

_TAKEN = "No recipe is named, so the default is taken:"


class Default(NamedTuple):
    """A default recipe, and a sentence for people that says why it is taken."""

    recipe: Recipe
    why: str


def default_recipe(model: str, called: str, otherwise: str) -> Default:
    """Return the default recipe for a model: `NETWORKS` if the statistics offered for it hold these networks.

    Args:
        model: the model's name, `model.config.name_or_path`.
        called: the user's name for it.
        otherwise: the recipe for a model without these networks.

    Raises:
        KeepsetError: the statistics cannot be read.
    """
    from keepset.recipe import Recipe  # imported here because it loads torch

    if has_networks(model):
        return Default(Recipe.parse(NETWORKS), f"{_TAKEN} {NETWORKS}, because there are networks for {called}.")
    return Default(Recipe.parse(otherwise), f"{_TAKEN} {otherwise}, because {lack_of_networks(called)}")


def default_for_chats(model: str) -> str:
    """Return the default recipe for conversations with a model (`model.config.name_or_path`).

    Raises:
        KeepsetError: the statistics cannot be read.
    """
    return CHATTED_NETWORKS if has_networks(model) else CHATTED


def lack_of_networks(called: str) -> str:
    """Return a sentence, without its capital letter: a model has no networks, and how to make them."""
    return (
        f"there are no networks for {called}: `keepset calibrate --model {called} --teacher reread --teacher "
        "prompt_queries --out stats.safetensors` makes them, and distilled(stats='stats.safetensors') names them."
    )


def default_methods(model: str) -> list[Recipe]:
    """Return every default for a model (`model.config.name_or_path`) without its budget, each once.

    Raises:
        KeepsetError: the statistics cannot be read.
    """
    from keepset.recipe import Recipe

    texts = [NETWORKS] if has_networks(model) else [ASKED_LATER, ANSWERED_AT_ONCE]
    return [Recipe.of(Recipe.parse(text).with_budget().method) for text in texts]


def has_networks(model: str) -> bool:
    """Return whether the statistics offered for a model (`model.config.name_or_path`) hold the networks of `distilled`.

    Raises:
        KeepsetError: the statistics cannot be read.
    """
    from keepset.core.statistics import offered

    measured = offered(model)
    return measured is not None and bool(measured.predictors)
