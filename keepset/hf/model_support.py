"""`check_model`: which models the transformers runtime can compress."""

from __future__ import annotations

from collections import Counter
from functools import partial
from inspect import unwrap
from typing import Any, cast
from weakref import WeakKeyDictionary

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from keepset.contexts.fingerprint import has_other_weights, sample_of
from keepset.contexts.weights import adapters_digest, unwrapped
from keepset.core import tables
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.select import NAN_MODEL
from keepset.core.statistics import Statistics
from keepset.core.tables import Tables
from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf.attention import AttentionInput, by_group
from keepset.hf.linear import matrix_of


def check_model(model: nn.Module) -> PreTrainedModel:
    """Return a model, without PEFT's wrapper, if its attention and cache are of the kind that keepset handles.

    Raises:
        UnsupportedModelError: says in one sentence what the model has.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"keepset.Cache takes a model, and this is {model!r:.80}: load one first, as by "
            "AutoModelForCausalLM.from_pretrained(...)."
        )
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} puts learned tokens in front of every prompt, which keepset does not see: use an "
            "adapter of weights, such as LoRA."
        )
    if hasattr(model, "get_base_model"):
        model = unwrapped(model)
    if not hasattr(model, "config"):
        raise UnsupportedModelError(f"{type(model).__name__} is no model of transformers, which keepset needs here.")
    whole: Any = model.config
    config = whole.get_text_config(decoder=True)
    declared = partial(getattr, config)
    encoder_decoder = declared("is_encoder_decoder", False) or getattr(whole, "is_encoder_decoder", False)
    foreign = not isinstance(model, PreTrainedModel) or not _uses_attention_interface(model)
    wrapped = hasattr(model, "_orig_mod")
    own_cache = not getattr(model, "_supports_default_dynamic_cache", lambda: True)()
    reasons = {
        "is torch.compile's wrapper: give keepset the model itself, or compile it in place by model.compile()": wrapped,
        "is an encoder-decoder; keepset compresses decoder-only models": encoder_decoder,
        "attends to images in layers of their own; keepset does not support that": declared(
            "cross_attention_layers", None
        ),
        "takes only a cache of its own kind, in whose place keepset's cannot stand": own_cache and not foreign,
        "does not use transformers' attention interface, which keepset needs; most decoder-only models do": foreign,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModelError(f"{type(model).__name__} {reason}.")
    return cast(PreTrainedModel, model)


def _uses_attention_interface(model: PreTrainedModel) -> bool:
    """Return whether a model, or the decoder inside it, can be given an attention implementation."""
    decoder: Any = model.get_decoder()
    return model._can_set_attn_implementation() or (
        isinstance(decoder, PreTrainedModel) and decoder._can_set_attn_implementation()
    )


def decoder_of(model: Any) -> Any:
    """Return the part of a model that takes a cache; some models use the name decoder for their language head."""
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def check_logits(logits: Tensor) -> None:
    """Refuse logits that are not numbers: every answer would be the same nonsense.

    Raises:
        KeepsetError: some are NaN.
    """
    if bool(logits.isnan().any()):
        raise KeepsetError(NAN_MODEL)


_own: WeakKeyDictionary[PreTrainedModel, set[tuple[Statistics | Tables, str]]] = WeakKeyDictionary()
"""Files that each model was compared with, and the adapters that it had: comparing weights for every cache takes longer
than making the cache."""


def config_of(model: PreTrainedModel, layer: int = -1) -> PreTrainedConfig:
    """Return the configuration of a layer: where sizes differ among layers (Gemma 4), the model's own has none.

    Where only some layers attend to all tokens, the last one does.

    Args:
        model: any model.
        layer: the layer's index in the model.
    """
    config = model.config.get_text_config(decoder=True)
    by_layer = getattr(config, "per_layer_config", None)
    return by_layer[layer] if by_layer else config


def head_dim_of(model: PreTrainedModel, layer: int = -1) -> int:
    """Return the size of a layer's key; a configuration may leave it to be derived.

    Args:
        model: any model.
        layer: the layer's index in the model.
    """
    config = config_of(model, layer)
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def statistics_for(model: PreTrainedModel, layers: tuple[int, ...], feature: ModelStatistics) -> Statistics:
    """Return the statistics in a file, or those that are offered for the model.

    Args:
        model: the model that they must fit.
        layers: indices of the compressed layers.
        feature: says which file, or which offer.

    Raises:
        KeepsetError: they are of another model.
    """
    measured = feature.load(model.config.name_or_path or "")
    config = model.config.get_text_config(decoder=True)
    if layers and caches_latents(config):
        measured.check(layers, 1, config.kv_lora_rank + config.qk_rope_head_dim)
    elif layers:
        config = config_of(model, layers[0])
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        measured.check(layers, kv_heads, head_dim_of(model, layers[0]))
    _check_own(model, measured, f"The statistics {measured.name!r}", "make them for this one with keepset calibrate.")
    return measured


def tables_for(model: PreTrainedModel, layers: int, file: str) -> Tables:
    """Return the tables in a file.

    Args:
        model: the model that they must fit.
        layers: how many layers are compressed.
        file: its path.

    Raises:
        KeepsetError: they are of another model.
    """
    compiled = tables.load(file)
    compiled.check(layers, model.config.get_text_config(decoder=True).num_attention_heads)
    _check_own(model, compiled, f"The tables {file!r}", "make them for this one with keepset compile.")
    return compiled


def _check_own(model: PreTrainedModel, measured: Statistics | Tables, named: str, advice: str) -> None:
    """Check that statistics or tables were made from this very model; accept older files that do not tell weights.

    Args:
        model: the model in use.
        measured: the statistics or tables.
        named: how an error calls them.
        advice: what an error tells to do.

    Raises:
        KeepsetError: they are of another model.
    """
    checked, compared = _own.setdefault(model, set()), (measured, adapters_digest(model))
    if compared in checked:
        return
    if has_other_weights(model, sample_of(measured)):
        raise KeepsetError(f"{named} are of another model of this shape, with other weights: {advice}")
    checked.add(compared)


def longest_in_cache(model: PreTrainedModel) -> int | None:
    """Return the length up to which a model goes on with a cache of no more tokens; None if there is none.

    Phi-3 and its like rotate all tokens in another way once the text is longer, and their `generate` then leaves the
    cache. No configuration tells this, but the names in the code do.
    """
    name = "original_max_position_embeddings"
    prepare = getattr(type(model), "prepare_inputs_for_generation", None)
    return getattr(model.config, name, None) if prepare and name in unwrap(prepare).__code__.co_names else None


def caches_latents(config: PreTrainedConfig) -> bool:
    """Return whether a decoder caches latents, from which it makes keys and values."""
    return getattr(config, "kv_lora_rank", None) is not None


def readers_of(config: PreTrainedConfig) -> dict[int, int]:
    """Return how many later layers attend to a layer's keys and values and have none of their own, by its index.

    The last layers of a decoder share those of the last layer before them of their type."""
    shared, kinds = getattr(config, "num_kv_shared_layers", None) or 0, getattr(config, "layer_types", None) or []
    storing_kinds = kinds[: len(kinds) - shared]
    readers = Counter(kinds[len(storing_kinds) :])
    return {
        len(storing_kinds) - 1 - storing_kinds[::-1].index(kind): number
        for kind, number in readers.items()
        if kind in storing_kinds
    }


def output_projections(up_to_event: AttentionInput) -> Float[Tensor, "query_heads value_dim hidden"]:
    """Return the output projections of each query head's values, for all modules whose query heads these are."""
    modules = up_to_event.modules or [up_to_event.module]
    query, _, value = up_to_event.as_made
    heads = query.shape[1] // len(modules)
    parts = [up_to_event.projected(output_projection(module, heads, value)) for module in modules]
    return parts[0] if len(parts) == 1 else by_group(parts, up_to_event.key.shape[1], 0)


_NAMES = ("o_proj", "out_proj", "dense", "c_proj")


def output_projection(
    module: nn.Module, query_heads: int, value: Float[Tensor, "batch kv_heads n value_dim"]
) -> Float[Tensor, "query_heads value_dim hidden"]:
    """Return what the output projection multiplies each query head's values by.

    Args:
        module: the attention module.
        query_heads: how many query heads it has.
        value: values of its type, on its device.

    Raises:
        UnsupportedModelError: there is no output projection of this size, or it is not linear.
    """
    for name in _NAMES:
        matrix = matrix_of(getattr(module, name, None), value, query_heads * value.shape[-1])
        if matrix is not None:
            return matrix.unflatten(0, (query_heads, value.shape[-1]))
    raise UnsupportedModelError(
        f"keepset could not find the output projection of {type(module).__name__}, which must be linear "
        f"({', '.join(_NAMES)}); methods that look at it do not support this model."
    )
