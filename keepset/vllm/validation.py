"""Checks of vLLM's configuration, of the model and its layers when the engine starts.

Errors say why something cannot be served. Layers are compressed, left alone or refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import vllm
from vllm import envs
from vllm.config import CompilationMode, VllmConfig
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

from keepset.core.features.runtime_features import ModelStatistics
from keepset.errors import UnsupportedEngineError, UnsupportedModelError
from keepset.paged.eviction import one_table
from keepset.recipe import Recipe
from keepset.vllm.compat import SUPPORTED, changed
from keepset.vllm.formats import LAYER_SCALES, ROW_SCALES, WHOLE, packed_otherwise
from keepset.vllm.recipe_support import COUNTED_AHEAD, INT8, lacking, objections, rotates, unserved
from keepset.vllm.settings import (
    CONTEXT_CONNECTOR,
    CONVERSATION_CONNECTOR,
    by_head,
    connector_of,
    contexts_of,
    has_connector,
    is_compressed,
    limits_of,
    serve_options,
    spills_of,
)

LAYERS_THAT_DRAFT = ("eagle", "eagle3", "mtp")
"""vLLM's drafting methods that use layers; these layers are not compressed."""


def check(config: VllmConfig, recipe: Recipe) -> None:
    """Refuse a recipe that cannot be served.

    Args:
        config: vLLM's configuration.
        recipe: its recipe.

    Raises:
        UnsupportedEngineError: vLLM's version or configuration is the reason, or vLLM lacks an input of the recipe.
        UnsupportedModelError: the model is the reason.
    """
    if changes := list(_of_version(config)):  # the other checks need this version's configuration
        raise UnsupportedEngineError(refusal(recipe, changes))
    unmet = *unserved(recipe.method.traits, limits_of(config)), *_of_config(config, recipe), *_of_ranks(config, recipe)
    reasons = [*objections(recipe), *unmet]
    if needed := list(_lacking(config, recipe)):
        reasons += [*needed, how_to_start(config, recipe)]
    if reasons:
        raise UnsupportedEngineError(refusal(recipe, reasons))
    if reasons := list(_of_model(config)):
        raise UnsupportedModelError(refusal(recipe, reasons))


def refusal(recipe: Recipe, reasons: Sequence[str]) -> str:
    """Return one message with all reasons why a recipe is not served.

    Args:
        recipe: the recipe.
        reasons: the reasons, one or more.
    """
    first, *remaining = reasons
    return " ".join(
        [f"keepset cannot serve {recipe}: {first}", *(reason[0].upper() + reason[1:] for reason in remaining)]
    )


def _of_version(config: VllmConfig) -> Iterator[str]:
    served = " or ".join(f"vllm=={version}.*" for version in SUPPORTED)
    if not vllm.__version__.startswith(tuple(f"{version}." for version in SUPPORTED)):
        yield f"vLLM {vllm.__version__} is not among the versions that it is tested with; install {served}."
    dtype = config.cache_config.cache_dtype
    rows = dtype in ROW_SCALES and not current_platform.is_cpu()
    for name in changed(rows, config.model_config.use_mla):
        yield f"{name} of vLLM {vllm.__version__} differs from the tested one; install {served}."


def _of_config(config: VllmConfig, recipe: Recipe) -> Iterator[str]:
    parallel = config.parallel_config
    if recipe.budget.kinds and not config.model_config.is_multimodal_model:
        yield f"its model takes no images; leave protect={recipe.budget.kinds[0]!r} out."
    yield from _of_drafts(config, recipe)
    yield from _of_conversations(config, recipe)
    connector = config.kv_transfer_config
    if contexts_of(config) is not None and connector is not None and connector.kv_load_failure_policy != "fail":
        yield "a context that a request names is never computed instead; leave kv_load_failure_policy out."
    yield from _of_connectors(config, recipe)
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism divides a request's entries; use tensor parallelism."
    if getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False):
        yield "micro-batch overlap runs two batches at once; leave enable_dbo out."
    dtype = config.cache_config.cache_dtype
    if dtype not in (*WHOLE, *LAYER_SCALES, *ROW_SCALES):
        yield (
            f"it serves KV caches of kind fp8, of kind {INT8} and of 16 bits, not of kind {dtype}; set kv_cache_dtype "
            f"(--kv-cache-dtype) to fp8 or {INT8}, or leave it out."
        )
    if config.model_config.use_mla:
        yield from _of_latents(config, recipe)
    if config.attention_config.use_non_causal:
        yield "attention that is not causal is not supported; leave use_non_causal out."
    yield from _of_graphs(config, recipe)
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        yield "it needs vLLM's hybrid KV-cache manager; leave disable_hybrid_kv_cache_manager out."


def _of_conversations(config: VllmConfig, recipe: Recipe) -> Iterator[str]:
    """Yield why conversations cannot be kept.

    Args:
        config: vLLM's configuration.
        recipe: the recipe.
    """
    spills = spills_of(config)
    if not recipe.schedule.turns:
        if spills is not None:
            yield "it keeps no conversations for which there is a folder; give turns=True, or leave the folder out."
        return
    if contexts_of(config) is not None:
        yield "a server keeps either conversations or contexts; leave turns=True, or contexts, out."
    if spills is not None and config.parallel_config.data_parallel_size > 1:
        yield "one engine keeps conversations in a folder; leave the folder, or data_parallel_size, out."
    if config.speculative_config is not None:
        yield "a conversation's pages hold no drafts; leave turns=True, or speculative decoding, out."


def _of_connectors(config: VllmConfig, recipe: Recipe) -> Iterator[str]:
    """Yield why another connector cannot run: it would store and load compressed pages as if they were whole.

    Args:
        config: vLLM's configuration.
        recipe: the recipe.
    """
    connector = connector_of(recipe, contexts_of(config))
    transfer = config.kv_transfer_config
    if transfer is not None and not has_connector(config, connector):
        yield (
            f"the only KV connector that is served here is keepset's {connector['kv_connector']}, because others move "
            f"whole caches; leave {transfer.kv_connector} out of kv_transfer_config."
        )


def _of_latents(config: VllmConfig, recipe: Recipe) -> Iterator[str]:
    """Yield why latents cannot be served: they are rows for all heads, and each process has a copy.

    Args:
        config: vLLM's configuration.
        recipe: the recipe.
    """
    traits, ranks = recipe.method.traits, config.parallel_config.tensor_parallel_size
    if contexts_of(config) is not None:
        yield "contexts hold keys and values, and the model caches latents; leave contexts out."
    if config.cache_config.cache_dtype not in WHOLE:
        yield "it reads latents in 16 and 32 bits only; leave kv_cache_dtype out."
    if ranks > 1 and traits.needs.of(ModelStatistics):
        yield "statistics are of all heads, and with tensor parallelism a process holds only some; use one GPU."


def _of_drafts(config: VllmConfig, recipe: Recipe) -> Iterator[str]:
    """Yield why drafts cannot be served: they may be rejected, which only the next step says.

    Args:
        config: vLLM's configuration.
        recipe: the recipe.
    """
    drafts, every = config.speculative_config, recipe.schedule.every
    if drafts is None:
        return
    if drafts.method not in (served := ("ngram", "suffix", *LAYERS_THAT_DRAFT)):
        yield f"drafts by {drafts.method} are not served; use {', '.join(served)}."
    elif config.scheduler_config.async_scheduling and every is not None and not by_head(config, recipe):
        yield COUNTED_AHEAD
    elif drafts.method in LAYERS_THAT_DRAFT and (
        config.model_config.is_multimodal_model or config.model_config.use_mla
    ):
        yield (
            f"layers that draft ({drafts.method}) are not served for models that take images or cache latents; "
            "use ngram."
        )


def _lacking(config: VllmConfig, recipe: Recipe) -> Iterator[str]:
    """Yield which arguments of `engine_args` the configuration lacks.

    Args:
        config: vLLM's configuration.
        recipe: the recipe.
    """
    caches_prefixes = config.cache_config.enable_prefix_caching
    if contexts_of(config) is not None:
        if not has_connector(config, CONTEXT_CONNECTOR):
            yield "contexts are loaded by a KV connector, which is not given."
        if not caches_prefixes:
            yield "requests share contexts as they share prefixes, and prefix caching is off."
    yield from lacking(recipe.method.traits, limits_of(config))
    if recipe.schedule.turns:
        yield from _lacking_for_turns(config)
    elif contexts_of(config) is None and caches_prefixes and not one_table(recipe):
        yield "its layers keep different numbers of entries, so that requests cannot share prefixes."
    connected = has_connector(config, connector_of(recipe, contexts_of(config)))
    if not connected and config.speculative_config is not None and recipe.schedule.every is not None:
        yield "drafts must end before events, which a KV connector sees to; none is given."
    if not connected and config.model_config.is_multimodal_model:
        if recipe.budget.kinds:
            yield "a KV connector must tell where each request's images are; none is given."
        elif rotates(recipe) and config.model_config.uses_mrope:
            yield "it cannot rotate images, so a KV connector must refuse requests with images; none is given."
    if recipe.method.traits.needs.unrotated and config.model_config.uses_mrope:
        yield "tokens of an image have positions along several axes, whose rotation it cannot undo; take snapkv."
    if recipe.method.traits.needs.hidden_states and not config.model_config.enforce_eager:
        yield "compiled code does not show the hidden states that it looks at."


def _lacking_for_turns(config: VllmConfig) -> Iterator[str]:
    """Yield which arguments the configuration lacks to keep conversations."""
    if contexts_of(config) is None and not has_connector(config, CONVERSATION_CONNECTOR):
        yield "a KV connector must say which conversation a request goes on with; none is given."
    if config.cache_config.enable_prefix_caching:
        yield "conversations have their own pages, so that requests cannot share prefixes."


def how_to_start(config: VllmConfig, recipe: Recipe) -> str:
    """Return a sentence that says what to write instead.

    Args:
        config: vLLM's configuration.
        recipe: the recipe.
    """
    contexts = contexts_of(config)
    served_recipe = None if contexts is not None and not is_compressed(config) else recipe
    options = ", ".join(
        [
            *([repr(str(served_recipe))] if served_recipe is not None else []),
            *([f"contexts={str(contexts)!r}"] if contexts else []),
        ]
    )
    return (
        f"write LLM(model, **keepset.vllm.engine_args({options})), or start vllm serve MODEL with "
        f"{serve_options(served_recipe, contexts=contexts)}"
    )


def _of_graphs(config: VllmConfig, recipe: Recipe) -> Iterator[str]:
    """Yield why CUDA graphs cannot be used: they do not replay the Python code that places ragged heads' entries.

    Args:
        config: vLLM's configuration.
        recipe: the recipe.
    """
    compilation = config.compilation_config
    if not compilation.cudagraph_mode or not by_head(config, recipe):
        return
    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        yield "breakable graphs would write its heads' entries to wrong places; set VLLM_USE_BREAKABLE_CUDAGRAPH=0."
    elif compilation.mode == CompilationMode.VLLM_COMPILE:
        kind = "mla_" if config.model_config.use_mla else ""
        for operator in (f"vllm::unified_{kind}attention_with_output", f"vllm::unified_{kind}kv_cache_update"):
            if operator not in (compilation.splitting_ops or ()):
                yield (
                    f"CUDA graphs would replay {operator}; leave splitting_ops, use_inductor_graph_partition and "
                    "fuse_attn_quant out."
                )


def _of_ranks(config: VllmConfig, recipe: Recipe) -> Iterator[str]:
    """Yield why parallelism cannot be used: each process compresses only its own heads of its own layers.

    Args:
        config: vLLM's configuration.
        recipe: the recipe.
    """
    heads, stages = config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size
    if heads > 1 and recipe.method.traits.counts_from_files and recipe.method.traits.needs.of(ModelStatistics):
        yield "it compares all heads, and with tensor parallelism a process holds only some; use one GPU."
    if stages > 1 and contexts_of(config) is not None:
        yield "contexts hold all layers, and a pipeline's stage only some; use tensor parallelism."


def _of_model(config: VllmConfig) -> Iterator[str]:
    model = config.model_config
    if model.runner_type != "generate":
        yield "only models that generate text have a cache to compress."
    if model.is_encoder_decoder:
        yield "encoder-decoder models are not supported."
    if getattr(model.hf_text_config, "index_topk", None) is not None:
        yield "the model has an indexer, which caches keys of its own beside latents; serve it without a recipe."
    if model.is_diffusion:
        yield "the model computes its answer's tokens more than once (diffusion)."
    if model.is_mm_prefix_lm:
        yield "the model attends to parts of its prompt in both directions."


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
        "has a scale for each head of its cache": hasattr(layer, "_k_scale") and layer._k_scale.numel() > 1,
        "has no module of its own, so its queries before rotation are not found": unseen,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModelError(f"keepset cannot serve this model: its layer {name} {reason}.")


_WINDOWS = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
_LEFT_ALONE = (*_WINDOWS, MambaSpec)
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


def check_layers(config: VllmConfig, recipe: Recipe, layers: Sequence[Any], other_specs: Sequence[KVCacheSpec]) -> None:
    """Refuse a model whose layers cannot be served together.

    Args:
        config: vLLM's configuration.
        recipe: its recipe.
        layers: vLLM's layers that are compressed.
        other_specs: the kinds of the other layers' caches.

    Raises:
        UnsupportedEngineError: vLLM's configuration is the reason.
        UnsupportedModelError: the model is the reason.
    """
    if not layers:
        raise UnsupportedModelError(
            f"keepset cannot serve {recipe}: all layers of the model have windows, chunks or recurrent states, so "
            "there is nothing to compress; serve the model without a recipe."
        )
    if reasons := list(_of_others(config, recipe, other_specs)):
        raise UnsupportedEngineError(refusal(recipe, reasons))
    shapes = {(layer.impl.num_heads, layer.impl.num_kv_heads, layer.impl.head_size) for layer in layers}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"keepset cannot serve {recipe}: the layers that attend to all tokens differ in their heads "
            f"(query heads, KV heads and their size: {', '.join(map(str, sorted(shapes)))})."
        )


def _of_others(config: VllmConfig, recipe: Recipe, other_specs: Sequence[KVCacheSpec]) -> Iterator[str]:
    """Yield what is not served beside layers that are left alone.

    Args:
        config: vLLM's configuration.
        recipe: the recipe.
        other_specs: the cache specs of the layers that are left alone.
    """
    if not other_specs:
        return
    if contexts_of(config) is not None:
        yield "contexts hold layers that attend to all tokens, and the model has others; leave contexts out."
    if recipe.schedule.turns and not all(isinstance(spec, _WINDOWS) for spec in other_specs):
        yield "the model's layers with recurrent states keep nothing between turns; leave turns=True out."
    if config.parallel_config.pipeline_parallel_size > 1:
        yield "a pipeline's stage does not know which layers of other stages are compressed; use tensor parallelism."
    dtype, attention = config.cache_config.cache_dtype, any(isinstance(spec, AttentionSpec) for spec in other_specs)
    if attention and dtype not in WHOLE and current_platform.is_cpu():
        yield f"on CPUs the model's other layers cannot read a KV cache of kind {dtype}; leave kv_cache_dtype out."
    if config.kv_transfer_config is None and any(isinstance(spec, MambaSpec) for spec in other_specs):
        yield "with recurrent layers a KV connector must have pages packed in time; none is given."
        yield how_to_start(config, recipe)


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
