"""Reasons why a recipe cannot be served: by any vLLM, or by an engine of which a few facts are known.

Finding them does not load vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from keepset.core import tables
from keepset.core.features.runtime_features import ModelStatistics, ModelTables, QuantizedEntries
from keepset.core.traits import Traits
from keepset.recipe import Recipe, check_schedule

INT8, INT4 = "int8_per_token_head", "int4_per_token_head"
_OF_BITS = {8: INT8, 4: INT4}
"""The `kv_cache_dtype` that a recipe quantized(...) asks for, by its bits."""


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
    """Return the `kv_cache_dtype` that these traits need; None if any will do."""
    bits = [feature.bits for feature in traits.needs.of(QuantizedEntries)]
    return _OF_BITS[min(bits)] if bits else None


def served(recipe: Recipe) -> Recipe:
    """Return a recipe as servers execute it: `quantized` means 8 bits unless the recipe gives another number.

    In vLLM's pages the answer's entries have as many bits as others, and 4 bits lose more than twice as many entries
    gain (docs/results.md). Under transformers the answer's have nearly 8, and `quantized` depends on the budget.
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
        yield "vLLM has no cache of 8 or 4 bits for latents that keepset can read; leave quantized out."


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
