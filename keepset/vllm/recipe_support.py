"""Reasons why a recipe cannot be served, by any vLLM or by an engine of which a few facts are known, and what can be.

A server that is given no recipe serves the default of the other commands, without steps that it cannot serve
(`nearest`). Nothing here loads vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from keepset.core import tables
from keepset.core.features.runtime_features import ModelStatistics, ModelTables, QuantizedEntries
from keepset.core.method import Allocator, Method
from keepset.core.traits import Traits
from keepset.methods.window import SnapKV
from keepset.recipe import Recipe, check_schedule

INT8 = "int8_per_token_head"
"""The `kv_cache_dtype` that a recipe quantized(...) asks for."""

_TABLES = ("default", "linear", "dynamic", "yarn", "llama3")
"""Kinds of rotary embeddings of which vLLM keeps one table of cosines and sines."""

COUNTED_AHEAD = (
    "the scheduler runs ahead, and counts drafts before it is known which are taken back; set async_scheduling=False "
    "(--no-async-scheduling)."
)
"""Why some recipes are not served with drafts."""


@dataclass(frozen=True)
class EngineLimits:
    """Facts of an engine that decide which steps of a recipe it can serve.

    Attributes:
        several_gpus: whether the model is divided over several GPUs.
        drafts: whether tokens are drafted, and may be rejected.
        ahead: whether the scheduler runs ahead of the steps (asynchronous scheduling).
        cache_dtype: vLLM's name of the cache's type.
        connector: whether a KV connector tells the scheduler how much was dropped.
        contexts: whether requests share contexts, so that all layers must keep equally many entries.
        latents: whether the model caches latents in place of keys and values.
        one_rotation: whether all layers of the model rotate by one table, according to its configuration.
    """

    several_gpus: bool = False
    drafts: bool = False
    ahead: bool = False
    cache_dtype: str = INT8
    connector: bool = True
    contexts: bool = False
    latents: bool = False
    one_rotation: bool = True


def cache_kind_of(traits: Traits) -> str | None:
    """Return the `kv_cache_dtype` that these traits need; None if any will do, or if none is served that would."""
    return INT8 if _bits(traits) == 8 else None


def _bits(traits: Traits) -> int | None:
    """Return the bits of stored numbers; None if entries are not quantised."""
    return min((feature.bits for feature in traits.needs.of(QuantizedEntries)), default=None)


def served(recipe: Recipe) -> Recipe:
    """Return a recipe as servers execute it: `quantized` means 8 bits unless the recipe gives another number.

    Under transformers it depends on the budget.
    """
    return replace(recipe, written=recipe.written.for_bytes(None))


def table_per_head(traits: Traits) -> bool:
    """Return whether each head has its own pages: heads keep different numbers of entries, or entries have biases."""
    return not (traits.fixed_total and traits.equal_heads) or traits.biased


def unserved(traits: Traits, limits: EngineLimits) -> Iterator[str]:
    """Yield reasons, which no further arguments remove, why an engine cannot serve these traits.

    Args:
        traits: traits of a recipe's method, or of one of its steps.
        limits: the known facts of the engine.
    """
    if limits.several_gpus and traits.across_layers:
        yield "it compares all heads of all layers, and each of several GPUs holds only some; use one GPU."
    if limits.drafts and limits.contexts:
        yield "speculative decoding takes tokens back, which requests with contexts cannot; leave one of them out."
    if limits.drafts and limits.ahead and table_per_head(traits):
        yield COUNTED_AHEAD
    if limits.contexts and not (traits.fixed_total and traits.equal_layers):
        yield (
            "requests share contexts as they share prefixes, so all layers must keep equally many entries, whatever "
            "the data: take a recipe such as adakv(snapkv, keep=512)."
        )
    if limits.latents and traits.biased:
        yield "the model caches latents, of which keys and values are both made; leave match out."
    if limits.latents and traits.needs.of(QuantizedEntries):
        yield "vLLM has no cache of 8 bits for latents that keepset can read; leave quantized out."


def lacking(traits: Traits, limits: EngineLimits) -> Iterator[str]:
    """Yield the arguments that an engine lacks to serve these traits, as sentences.

    Args:
        traits: traits of a recipe's method, or of one of its steps.
        limits: the known facts of the engine.
    """
    if not limits.contexts and not limits.connector and not traits.fixed_total:
        yield "how much it keeps depends on the data, so a KV connector must tell the scheduler; none is given."
    if cache_kind_of(traits) not in (None, limits.cache_dtype):
        yield f"it stores entries in {traits.key_bits} bits, and the KV cache is of kind {limits.cache_dtype}."


def rotates(recipe: Recipe) -> bool:
    """Return whether a recipe rotates by measured frequencies, so that a token needs a single position."""
    return any(measured.rotates for measured in recipe.method.traits.needs.of(ModelStatistics))


def objections(recipe: Recipe) -> Iterator[str]:
    """Yield the reasons why a recipe cannot be served, a sentence each.

    Raises:
        KeepsetError: if the recipe's schedule is invalid, or its statistics or tables cannot be read.
    """
    method, traits = recipe.method, recipe.method.traits
    check_schedule(recipe)
    if (bits := _bits(served(recipe).method.traits)) not in (None, 8):
        yield f"it stores entries in {bits} bits, and vLLM's pages hold 8 or 16; write bits=8."
    unseen = [feature for feature in traits.needs if feature.transformers_only]
    yield from (f"{method.name} {feature.transformers_only.format(engine='vLLM')}." for feature in unseen)
    if traits.across_layers and traits.fixed_total and not traits.equal_layers:
        yield (
            f"{method.name} looks across layers whose quotas differ, so that events are not the same for all; "
            "its traits must say that counts come from the data (counts_from_data)."
        )
    if unseen:
        return  # its files do not matter
    # Raises if there is no file, because the engine's processes know no other statistics and tables.
    for measured in traits.needs.of(ModelStatistics):
        measured.load()
    for compiled in traits.needs.of(ModelTables):
        tables.load(compiled.file)


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
        is_served = _serves(method.own_traits, limits)
        if not is_served:
            missing.append(method.name)
        inner = _nearest(method.scorer, limits, missing)
        return replace(method, scorer=inner) if is_served else inner
    if _serves(method.traits, limits):
        return method
    missing.append(method.name)
    return SnapKV()


def _serves(traits: Traits, limits: EngineLimits) -> bool:
    """Return whether a step of a recipe can be served, given its own traits.

    Args:
        traits: the traits of that step alone.
        limits: what the engine can serve.
    """
    if traits.needs.unrotated and not limits.one_rotation:
        return False
    return not [*unserved(traits, limits), *lacking(traits, limits)]


def one_rotation(config: Mapping[str, Any]) -> bool:
    """Return whether all layers rotate by one table, according to transformers' configuration of a model's text part.

    They do not if only some layers rotate, layers rotate differently, or queries change after their rotation.
    """
    rotation, kinds = config.get("rope_parameters"), {*(config.get("layer_types") or ())}
    if not isinstance(rotation, Mapping) or rotation.get("rope_type", "default") not in _TABLES:
        return False
    local = {"sliding_attention", "chunked_attention"} & kinds  # perhaps the only layers that rotate
    unlike = ("no_rope_layers", "use_qk_norm", "llama_4_scaling")
    return not (local or "mrope_section" in rotation or any(config.get(name) for name in unlike))
