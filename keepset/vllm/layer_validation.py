"""Checks of a vLLM model's layers: which are compressed, which are left alone, and which are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from keepset.errors import UnsupportedEngineError, UnsupportedModelError
from keepset.recipe import Recipe
from keepset.vllm.formats import WHOLE, packed_otherwise
from keepset.vllm.settings import BESIDE_MODULE, connectors_of, contexts_of
from keepset.vllm.validation import how_to_start, refusal


def check_layer(name: str, layer: Any, *, unseen: bool = False) -> None:
    """Refuse a layer that cannot be compressed.

    Args:
        name: the layer's name.
        layer: vLLM's layer.
        unseen: whether its queries before rotation are needed, but the module that makes them was not found.

    Raises:
        UnsupportedModelError: the layer cannot be compressed.
    """
    impl = layer.impl
    reasons = {
        "brings its own attention backend": not type(impl).__module__.startswith("keepset."),
        "shares its keys and values with another layer": (
            getattr(layer, "kv_sharing_target_layer_name", None) is not None
        ),
        "attends to chunks": getattr(impl, "chunk_lookback", -1) != -1,
        "adds biases by distance to its logits (ALiBi)": getattr(impl, "alibi_slopes", None) is not None,
        "has a scale for each head of its cache": getattr(layer, "_k_scale", torch.ones(())).numel() > 1,
        "has no module of its own, so its queries before rotation are not found": unseen,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModelError(f"keepset cannot serve this model: its layer {name} {reason}.")


_LEFT_ALONE = (SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
"""Kinds of caches whose size is bounded, whatever the text's length."""


def leaves_alone(spec: KVCacheSpec | None) -> bool:
    """Return whether keepset leaves a layer to vLLM, because the size of its cache is bounded.

    Args:
        spec: the kind of the layer's cache, before the backend customizes it; None if it has none.

    Raises:
        UnsupportedModelError: layers of this kind are neither left alone nor compressed.
    """
    if spec is None or isinstance(spec, _LEFT_ALONE):
        return True
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise UnsupportedModelError(
            f"keepset cannot serve this model: the cache of its layers is of the kind {type(spec).__name__}."
        )
    return False


def check_layers(config: VllmConfig, recipe: Recipe, layers: Sequence[Any], others: Sequence[KVCacheSpec]) -> None:
    """Refuse a model whose layers cannot be served together.

    Args:
        config: vLLM's configuration.
        recipe: its recipe.
        layers: vLLM's layers that are compressed.
        others: the kinds of the other layers' caches.

    Raises:
        UnsupportedEngineError: vLLM's configuration is the reason.
        UnsupportedModelError: the model is the reason.
    """
    if not layers:
        raise UnsupportedModelError(
            f"keepset cannot serve {recipe}: all layers of the model have windows, chunks or recurrent states, so "
            "there is nothing to compress; serve the model without a recipe."
        )
    if reasons := list(_of_others(config, recipe, others)):
        raise UnsupportedEngineError(refusal(recipe, reasons))
    shapes = {(layer.impl.num_heads, layer.impl.num_kv_heads, layer.impl.head_size) for layer in layers}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"keepset cannot serve {recipe}: the layers that attend to all tokens differ in their heads "
            f"(query heads, KV heads and their size: {', '.join(map(str, sorted(shapes)))})."
        )


def _of_others(config: VllmConfig, recipe: Recipe, others: Sequence[KVCacheSpec]) -> Iterator[str]:
    """Yield what is not served beside layers that are left alone."""
    if not others:
        return
    if contexts_of(config) is not None:
        yield "contexts hold layers that attend to all tokens, and the model has others; leave contexts out."
    if config.parallel_config.pipeline_parallel_size > 1:
        yield "a pipeline's stage does not know which layers of other stages are compressed; use tensor parallelism."
    dtype, attention = config.cache_config.cache_dtype, any(isinstance(spec, AttentionSpec) for spec in others)
    if attention and dtype not in WHOLE and current_platform.is_cpu():
        yield f"on CPUs the model's other layers cannot read a KV cache of kind {dtype}; leave kv_cache_dtype out."
    if config.kv_transfer_config is None and any(isinstance(spec, MambaSpec) for spec in others):
        yield "with recurrent layers a KV connector must have pages packed in time; none is given."
        yield how_to_start(config, recipe)
    if any(connector.module == BESIDE_MODULE for connector in connectors_of(config)):
        yield "other KV connectors cannot store layers that are not compressed; leave them out."


def check_spec(spec: AttentionSpec) -> FullAttentionSpec:
    """Return the kind of a layer's cache, if the cache holds whole keys and values of all tokens.

    Raises:
        UnsupportedModelError: the cache does not.
    """
    latents = type(spec) is MLAAttentionSpec
    reasons = {
        f"is of the kind {type(spec).__name__}": type(spec) is not FullAttentionSpec and not latents,
        "is attended to in both directions": getattr(spec, "non_causal", False)
        or getattr(spec, "non_causal_multi_token_decode", False),
        "has values of another size than keys": spec.head_size_v != spec.head_size and not latents,
        "is quantized or packed in a way that keepset does not know": packed_otherwise(spec),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModelError(f"keepset cannot serve this model: the cache of its layers {reason}.")
    assert isinstance(spec, FullAttentionSpec)
    return spec
