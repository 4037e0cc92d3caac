"""The recipe of a server if none is named: the default of the other commands, without steps that it cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from keepset.core.method import Allocator, Method
from keepset.core.traits import Traits
from keepset.methods.snapkv import SnapKV
from keepset.recipe import Recipe
from keepset.vllm.recipe_support import EngineLimits, lacking, unserved

_TABLES = ("default", "linear", "dynamic", "yarn", "llama3")
"""Kinds of rotary embeddings of which vLLM keeps one table of cosines and sines."""


def nearest(recipe: Recipe, limits: EngineLimits) -> tuple[Recipe, tuple[str, ...]]:
    """Return a recipe without the steps that an engine cannot serve.

    A step that only divides the budget or stores entries is left out. A scorer that cannot be served is replaced by
    `snapkv`, which every engine serves.

    Args:
        recipe: the recipe.
        limits: the known facts of the engine.

    Returns:
        The recipe, and the names of the steps that were left out or replaced.
    """
    missing: list[str] = []
    method = _nearest(recipe.written, limits, missing)
    budget, short = recipe.budget, recipe.budget.short
    return Recipe.of(method, keep=budget.keep, bytes=budget.bytes, short=short), tuple(missing)


def _nearest(method: Method, limits: EngineLimits, missing: list[str]) -> Method:
    if isinstance(method, Allocator):
        served = _serves(method.own_traits, limits)
        if not served:
            missing.append(method.name)
        inner = _nearest(method.scorer, limits, missing)
        return replace(method, scorer=inner) if served else inner
    if _serves(method.traits, limits):
        return method
    missing.append(method.name)
    return SnapKV()


def _serves(own: Traits, limits: EngineLimits) -> bool:
    """Return whether a step of a recipe can be served, given its own traits."""
    if own.needs.unrotated and not limits.one_rotation:
        return False
    return not [*unserved(own, limits), *lacking(own, limits)]


def one_rotation(config: Mapping[str, Any]) -> bool:
    """Return whether all layers of a model rotate by one table, according to its configuration.

    They do not if only some layers rotate, layers rotate differently, or queries change after their rotation.

    Args:
        config: the configuration of the model's text part, as transformers writes it.
    """
    rotation, kinds = config.get("rope_parameters"), {*(config.get("layer_types") or ())}
    if not isinstance(rotation, Mapping) or rotation.get("rope_type", "default") not in _TABLES:
        return False
    local = {"sliding_attention", "chunked_attention"} & kinds  # perhaps the only layers that rotate
    unlike = ("no_rope_layers", "use_qk_norm", "llama_4_scaling")
    return not (local or "mrope_section" in rotation or any(config.get(name) for name in unlike))
