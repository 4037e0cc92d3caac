"""What of a recipe no vLLM serves, told without loading vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from keepset.core import statistics
from keepset.core.features.runtime_features import ModelStatistics
from keepset.recipe import Recipe, check_schedule


def objections(recipe: Recipe) -> Iterator[str]:
    """Why it cannot be served, a sentence each.

    Raises:
        KeepsetError: its schedule or its statistics are none.
    """
    method, needs = recipe.method, recipe.method.needs
    check_schedule(recipe)  # or its own sentence
    for feature in needs:
        if feature.transformers_only:
            yield f"{method.name} {feature.transformers_only.format(engine='vLLM')}."
    if method.across_layers and method.fixed_total and not method.equal_layers:
        yield (
            f"{method.name} looks across layers whose quotas differ, so that events are not the same for all; "
            "its class must say that counts come from the data (counts_from_data)."
        )
    for measured in needs.of(ModelStatistics):
        statistics.load(measured.file)  # or its own sentence: the engine's processes know none but those in files
