"""The recipes of commands and of the playground where none is named, each a quarter of a full 16-bit cache's bytes."""

from __future__ import annotations

NETWORKS = "quantized(match(pool(distilled)), bytes=0.25)"
"""For a model whose statistics hold the networks of `distilled`. It takes one pass."""
ANSWERED_AT_ONCE = "quantized(pool(prompt_queries), bytes=0.25)"
"""For other models, and a prompt that is answered at once. It takes one pass."""
ASKED_LATER = "quantized(match(reread), bytes=0.25)"
"""For other models, and a text that is asked about later. It takes two passes."""

SHORT = 256
"""The tokens below which a prompt is short: little of it can be spared, so no default compresses it."""
COMPARED = ("reread", "glance", "snapkv", "adakv(expected_attention)", "kvzip", "streaming_llm", "random")
"""Recipes without budgets that stand beside the defaults in comparisons and in the playground's list."""


def default_recipe(model: str, otherwise: str) -> str:
    """Return the recipe for a model: `NETWORKS` if the statistics that are offered for it hold those networks.

    Args:
        model: the model's name, `model.config.name_or_path`.
        otherwise: the recipe for a model without them.

    Raises:
        KeepsetError: the statistics cannot be read.
    """
    from keepset.core.statistics import offered

    measured = offered(model)
    return NETWORKS if measured is not None and measured.predictors else otherwise


def default_recipes(model: str) -> list[str]:
    """Return every default for a model, each once.

    Args:
        model: the model's name, `model.config.name_or_path`.

    Raises:
        KeepsetError: the statistics cannot be read.
    """
    return list(dict.fromkeys(default_recipe(model, otherwise) for otherwise in (ASKED_LATER, ANSWERED_AT_ONCE)))
