"""Which layers share block tables: those that keep the same, so that a hungry one does not hold the others' pages."""

from __future__ import annotations

from keepset.recipe import Recipe

GROUPS = 6
"""Groups of neighbouring layers where the data say how much each keeps: more hold less, and cost more per step."""


def one_table(recipe: Recipe) -> bool:
    """Whether all layers keep equally many entries, and can share one table."""
    return recipe.method.fixed_total and recipe.method.equal_layers


def table_per_head(recipe: Recipe) -> bool:
    """Whether keepset itself finds each head's pages: they may differ, or no engine adds their entries' biases."""
    return not (recipe.method.fixed_total and recipe.method.equal_heads) or recipe.method.biased


def group_leader(recipe: Recipe, layer: int, layers: tuple[int, ...]) -> int:
    """The first of the layers whose table this layer shares."""
    if one_table(recipe):
        return layers[0]
    if recipe.method.fixed_total:
        return layer
    place, groups = layers.index(layer), min(GROUPS, len(layers))
    first = -(-(place * groups // len(layers)) * len(layers) // groups)
    return layers[first]
