"""The tensors of each kind of cache layer in a saved context, and their restoration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from keepset.core.tensor_file import below
from keepset.errors import UnsupportedModelError
from keepset.hf import saved_schema
from keepset.hf.layer import LayerState
from keepset.hf.other_layers import own_layers, restore_states, states, states_of_a_token
from keepset.hf.saved_schema import STATE


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """Return all that a layer of a cache holds."""
    held: dict[str, Tensor] = {}
    if isinstance(layer, LinearAttentionLayer):
        held = {f"{STATE}{name}": state for name, state in states(layer).items()}
        if type(layer) is LinearAttentionLayer:
            return held
    if isinstance(layer, LayerState):
        assert layer.store is not None
        held |= {f"columns.{name}": column for name, column in layer.store.packed.items()}
        if layer.decoding is not None:
            held |= {f"passing.{name}": tensor for name, tensor in layer.decoding.recorder.tensors.items()}
        return held | {"counts": torch.tensor(layer.store.counts).view(layer.store.batch, layer.store.kv_heads)}
    windows = DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer
    if type(layer) in windows and layer.keys is not None and layer.values is not None:
        # Tokens before the window are held only while a draft may be taken back.
        first = max(layer.keys.shape[2] - layer.sliding_window + 1, 0)
        return held | {"keys": layer.keys[:, :, first:], "values": layer.values[:, :, first:]}
    raise UnsupportedModelError(
        f"The model has a {type(layer).__name__} among the layers of its cache, and keepset saves only those of keys "
        "and values, sliding windows and recurrent states: this context cannot be saved."
    )


def restore(layer: Any, tensors: Mapping[str, Tensor], logical: int) -> None:
    """Restore the tensors of one cache layer in an empty one; raise ValueError if they are of another kind."""
    given = {
        "counts": isinstance(layer, LayerState),
        "keys": isinstance(layer, DynamicSlidingWindowLayer) and not isinstance(layer, LayerState),
    }
    if any((name in tensors) != expected for name, expected in given.items()):
        raise ValueError
    held = below(STATE, tensors)
    if held and not isinstance(layer, LinearAttentionLayer):
        raise ValueError
    if isinstance(layer, LinearAttentionLayer):
        restore_states(layer, held)
    if isinstance(layer, LayerState):
        layer.store, layer.logical = layer.store_type.of(below("columns.", tensors), tensors["counts"]), logical
        if layer.decoding is not None:
            layer.decoding.recorder.restore(below("passing.", tensors), logical, layer.decoding.next)
    elif "keys" in tensors:
        layer.lazy_initialization(tensors["keys"], tensors["values"])
        layer.keys, layer.values = tensors["keys"], tensors["values"]
        layer.cumulative_length = logical


def with_states(layers: Sequence[Mapping[str, Tensor]], model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """Return a file's layers with states in the model's precision.

    Raises:
        ValueError: states are of other sizes than the model's.
    """
    held = [below(STATE, layer) for layer in layers]
    own = own_layers(model.config.get_text_config(decoder=True), type(model).__name__)
    if not any(held) and not any(isinstance(layer, LinearAttentionLayer) for layer in own):
        return [dict(layer) for layer in layers]
    models = states_of_a_token(model)
    saved_schema.check_states(held, models)
    return [
        {**layer, **{f"{STATE}{name}": state.to(like[name].dtype) for name, state in own_states.items()}}
        for layer, own_states, like in zip(layers, held, models, strict=True)
    ]
