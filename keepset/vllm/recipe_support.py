"""Reasons why a recipe cannot be served under any vLLM. vLLM is not loaded for that."""

from __future__ import annotations

from collections.abc import Iterator

from keepset.core import tables
from keepset.core.features.runtime_features import ModelStatistics, ModelTables, QuantizedEntries
from keepset.recipe import Recipe, check_schedule


def rotates(recipe: Recipe) -> bool:
    """Return whether a recipe rotates by measured frequencies, for which a token needs one position."""
    return any(measured.rotates for measured in recipe.method.traits.needs.of(ModelStatistics))


def objections(recipe: Recipe) -> Iterator[str]:
    """Yield the reasons why a recipe cannot be served, a sentence each.

    Raises:
        KeepsetError: if the recipe's schedule is invalid, or its statistics or tables cannot be read.
    """
    method, traits = recipe.method, recipe.method.traits
    check_schedule(recipe)
    unseen = [feature for feature in traits.needs if feature.transformers_only]
    yield from (f"{method.name} {feature.transformers_only.format(engine='vLLM')}." for feature in unseen)
    if any(feature.bits != 8 for feature in traits.needs.of(QuantizedEntries)):
        yield (
            f"{method.name} stores entries in 4 bits, and no pages of vLLM hold what keepset writes: write bits=8, "
            "or build a context, which is widened when it is loaded."
        )
    if traits.across_layers and traits.fixed_total and not traits.equal_layers:
        yield (
            f"{method.name} looks across layers whose quotas differ, so that events are not the same for all; "
            "its traits must say that counts come from the data (counts_from_data)."
        )
    if unseen:
        return  # whatever its files are
    # Raises where there is no file: the engine's processes know no other statistics and tables.
    for measured in traits.needs.of(ModelStatistics):
        measured.load()
    for compiled in traits.needs.of(ModelTables):
        tables.load(compiled.file)
