"""Groups of layers that share block tables: those that keep equally many entries, so none holds another's pages."""

from __future__ import annotations

from keepset.recipe import Recipe

GROUPS = 6
"""The number of groups where counts come from the data. More groups hold fewer pages, and cost more per step."""


def one_table(recipe: Recipe) -> bool:
    """Return whether all layers keep equally many entries, and can share one block table."""
    return recipe.method.traits.fixed_total and recipe.method.traits.equal_layers


def table_per_head(recipe: Recipe) -> bool:
    """Return whether keepset itself finds each head's pages: heads may differ, or entries have biases."""
    return not (recipe.method.traits.fixed_total and recipe.method.traits.equal_heads) or recipe.method.traits.biased


def group_leader(recipe: Recipe, layer: int, layers: tuple[int, ...]) -> int:
    """Return the first of the layers whose block table a layer shares.

    Args:
        recipe: the recipe that is served.
        layer: the layer, by its index in the model.
        layers: all layers of the model that are compressed.
    """
    if one_table(recipe):
        return layers[0]
    if recipe.method.traits.fixed_total:
        return layer
    place, groups = layers.index(layer), min(GROUPS, len(layers))
    first = -(-(place * groups // len(layers)) * len(layers) // groups)
    return layers[first]
