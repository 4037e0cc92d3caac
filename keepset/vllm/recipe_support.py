"""Reasons why a recipe cannot be served under any vLLM. vLLM is not loaded for that."""

from __future__ import annotations

from collections.abc import Iterator

from keepset.core import statistics
from keepset.core.features.runtime_features import ModelStatistics
from keepset.recipe import Recipe, check_schedule


def objections(recipe: Recipe) -> Iterator[str]:
    """Yield the reasons why a recipe cannot be served, a sentence each.

    Raises:
        KeepsetError: the recipe's schedule is invalid, or its statistics cannot be read.
    """
    method, needs = recipe.method, recipe.method.needs
    check_schedule(recipe)
    for feature in needs:
        if feature.transformers_only:
            yield f"{method.name} {feature.transformers_only.format(engine='vLLM')}."
    if method.across_layers and method.fixed_total and not method.equal_layers:
        yield (
            f"{method.name} looks across layers whose quotas differ, so that events are not the same for all; "
            "its class must say that counts come from the data (counts_from_data)."
        )
    for measured in needs.of(ModelStatistics):
        statistics.load(measured.file)  # the engine's processes know no statistics but those in files
