"""Layers that hold other things than entries: transformers' own, such as sliding windows, and the states of hybrids.

`mend_mixers` makes models go on from such states with several tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from keepset.contexts.weights import device_of
from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf.attention import uncompiled
from keepset.hf.layer import LayerState


class HybridLayerState(LinearAttentionLayer, LayerState):  # type: ignore[override]
    """A layer whose attention is compressed, and whose convolution and recurrent states are not.

    Args:
        index: of the layer.
        like: transformers' own layer, which is empty.
    """

    is_compileable = False

    def __init__(self, index: int, like: LinearAttentionAndFullAttentionLayer) -> None:
        vars(self).update(vars(like))
        LayerState.__init__(self, index)

    @property
    def nbytes_states(self) -> int:
        states = [*self.conv_states.values(), *self.recurrent_states.values()]
        return sum(state.nbytes for state in states if state is not None)

    def copy_states(self, source: LinearAttentionLayer) -> None:
        vars(self).update(states_of(source))

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        LayerState.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        LayerState.reorder_cache(self, beam_idx)

    def fork(self) -> LayerState:
        copied = super().fork()
        copied.copy_states(self)
        return copied


def own_layers(config: PreTrainedConfig, model: str) -> list[Any]:
    """Return transformers' own layers of an empty cache, for a decoder's configuration.

    Args:
        config: the configuration of the model's decoder.
        model: the model's name, for errors.

    Raises:
        UnsupportedModelError: the configuration does not describe the layers.
    """
    try:
        return DynamicCache(config=config).layers
    except (AttributeError, KeyError) as error:
        raise UnsupportedModelError(
            f"transformers makes no cache for {model}, because its configuration does not tell the layers of a decoder."
        ) from error


def is_bounded(layer: Any) -> bool:
    """Return whether a layer of transformers holds no more for a longer text."""
    # A model's own kind of window may hold more, such as a summary of earlier tokens.
    slides = getattr(layer, "is_sliding", False) and type(layer).__module__ == cache_utils.__name__
    return slides or (isinstance(layer, LinearAttentionLayer) and not isinstance(layer, DynamicLayer))


def compressible(index: int, layer: Any) -> LayerState | None:
    """Return the keepset layer that replaces a layer of transformers; None if that does not grow without bound.

    Args:
        index: the layer's index in the model.
        layer: the layer that transformers would use.
    """
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return HybridLayerState(index, layer)
    return LayerState(index) if type(layer) is DynamicLayer else None


def states_of(layer: LinearAttentionLayer, requests: slice = slice(None)) -> dict[str, Any]:
    """Return a copy of the states of some requests, with their flags, as a layer's attributes.

    Args:
        layer: a layer of transformers with states.
        requests: which rows of the batch.
    """

    def copied(value: Any) -> Any:
        return value[requests].clone() if isinstance(value, Tensor) else value

    noted = {
        name: {key: copied(state) for key, state in x.items()} for name, x in vars(layer).items() if type(x) is dict
    }
    return {**noted, "device": layer.device, "dtype": layer.dtype}


def states(layer: LinearAttentionLayer) -> dict[str, Tensor]:
    """Return a layer's recurrent and convolution states, by their kind and number.

    A convolution's input may be longer than its next step needs, while a draft may be taken back.
    """
    layer_states = {}
    for number in range(layer.number_of_states):
        inputs, recurrent = layer.conv_states[number], layer.recurrent_states[number]
        size = layer.conv_kernel_size[number]
        if inputs is not None and size is not None:
            layer_states[f"convolution.{number}"] = F.pad(inputs[..., -size:], (max(size - inputs.shape[-1], 0), 0))
        if recurrent is not None:
            layer_states[f"recurrent.{number}"] = recurrent
    return layer_states


def restore_states(layer: LinearAttentionLayer, saved_states: Mapping[str, Tensor]) -> None:
    """Put the `states` of another layer into an empty one.

    Args:
        layer: the layer to fill.
        saved_states: tensors by the names that `states` gives them.

    Raises:
        ValueError: the layer has fewer states.
    """
    for name, state in saved_states.items():
        kind, _, number = name.partition(".")
        index = int(number)
        if index >= layer.number_of_states:
            raise ValueError
        if kind == "convolution":
            layer.lazy_initialization(conv_states=state, state_idx=index)
            layer.conv_states[index], layer.has_previous_state[index] = state, True
        else:
            layer.lazy_initialization(recurrent_states=state, state_idx=index)
            layer.recurrent_states[index] = state


@torch.no_grad()
def states_of_a_token(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """Return every layer's states after one token, because no configuration tells their sizes and types."""
    token_cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(torch.zeros(1, 1, dtype=torch.long, device=device_of(model)), past_key_values=token_cache, use_cache=True)
    return [states(layer) if isinstance(layer, LinearAttentionLayer) else {} for layer in token_cache.layers]


_forgetful: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a mixer ignores a state if several tokens come; it is tried at the first call of this kind."""
_MENDED = "_keepset_mends_states"
"""Attribute of a mixer that has the hooks."""
_LATER = "_keepset_later_tokens"
"""Attribute of a first token's hidden states: the arguments of the calls that follow."""


def mend_mixers(model: nn.Module) -> None:
    """Make a model's mixers go on from their states whatever the number of tokens, from now on and with any cache.

    Some of transformers' mixers (Jamba's, Zamba's) begin anew if several tokens come together, as those of a question,
    of a part of a prompt or of a second pass do. They are given these tokens one by one. The hooks hold nothing of a
    cache, so they stay.
    """
    kinds = {type(module) for module in model.modules()}
    # By this name transformers gives a mixer the cache that holds its states.
    mixers = {kind for kind in kinds if "cache_params" in inspect.signature(kind.forward).parameters}
    for module in model.modules():
        if type(module) in mixers and not hasattr(module, _MENDED):
            setattr(module, _MENDED, True)
            module.register_forward_pre_hook(_first_token, with_kwargs=True)
            module.register_forward_hook(_later_tokens, with_kwargs=True)


@torch.no_grad()
def _forgets(module: nn.Module, call: dict[str, Any]) -> bool:
    """Return whether several tokens get the same outputs whatever one of the states holds."""
    index: Any = module.layer_idx
    layers = call["cache_params"].layers

    def outputs(kind: str = "", number: int = 0) -> Tensor:
        layer = copy.copy(layers[index])
        vars(layer).update(states_of(layers[index]))
        if kind:
            getattr(layer, kind)[number].mul_(2).add_(1)
        past = Cache(layers=[*layers[:index], layer, *layers[index + 1 :]])
        return module.forward(**_part(call, slice(0, 2)), cache_params=past)

    kinds = [(kind, getattr(layers[index], kind)) for kind in ("conv_states", "recurrent_states")]
    state_keys = [(kind, number) for kind, states in kinds for number, state in states.items() if state is not None]
    expected = outputs()
    return any(torch.equal(expected, outputs(kind, number)) for kind, number in state_keys)


def _part(call: dict[str, Any], tokens: slice) -> dict[str, Any]:
    part = {name: value for name, value in call.items() if name != "cache_params"}
    part["hidden_states"] = call["hidden_states"][:, tokens]
    if part.get("attention_mask") is not None:
        part["attention_mask"] = call["attention_mask"][:, tokens]
    return part


@uncompiled
def _first_token(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]] | None:
    """Leave of a call its first token, if the mixer would forget its state."""
    call = {**dict(zip(("hidden_states", "cache_params", "attention_mask"), args, strict=False)), **kwargs}
    past, n = call.get("cache_params"), call["hidden_states"].shape[1]
    if n == 1 or past is None or not past.has_previous_state(module.layer_idx):
        return None
    if module not in _forgetful:
        _forgetful[module] = _forgets(module, call)
    if not _forgetful[module]:
        return None
    first, *later = ({**_part(call, slice(i, i + 1)), "cache_params": past} for i in range(n))
    setattr(first["hidden_states"], _LATER, later)
    return (), first


@uncompiled
def _later_tokens(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """Return the outputs of all tokens, if the call had only the first of them."""
    later = getattr(kwargs.get("hidden_states"), _LATER, None)
    return None if later is None else torch.cat([output, *(module(**call) for call in later)], 1)


def nbytes_of(layer: Any) -> int:
    """Return the bytes that transformers' own layer holds: a sliding window may be a view of the whole prompt."""
    values = [x for part in vars(layer).values() for x in (part.values() if isinstance(part, dict) else [part])]
    storages = [tensor.untyped_storage() for tensor in values if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def cropped(layer: Any, removed: int, length: int) -> dict[str, Any]:
    """Return the attributes that a layer has without its newest tokens; the layer itself stays as it is.

    Args:
        layer: any layer of transformers.
        removed: how many of the newest tokens to leave out.
        length: how many tokens are left.
    """
    if not removed and not getattr(layer, "record_past", False):
        return {}
    shorter = copy.copy(layer)
    vars(shorter).update({name: dict(part) for name, part in vars(layer).items() if isinstance(part, dict)})
    try:
        goes_back = not removed or getattr(layer, "is_croppable", True)
        shorter.crop(-removed)
    except RuntimeError:
        goes_back = False
    if goes_back and getattr(layer, "is_sliding", False) and layer.is_initialized:
        goes_back = shorter.keys.shape[-2] >= min(layer.sliding_window - 1, length)
    if not goes_back:
        raise KeepsetError(
            f"A {type(layer).__name__} among the model's layers cannot take back {removed} tokens, so no layer has: go "
            "on from a copy made before them (cache.fork())."
        )
    return vars(shorter)


def one_request(layer: Any, request: int, length: int, valid: Bool[Tensor, "batch tokens"] | None) -> Any:
    """Return a copy of transformers' own layer that holds one request without its padding.

    Args:
        layer: any layer of transformers.
        request: the row of the batch.
        length: the request's tokens without padding.
        valid: which tokens are no padding; None if all are.
    """

    def alone(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: alone(value) for name, value in part.items()}
        return part[request : request + 1].clone() if isinstance(part, Tensor) and part.ndim else part

    copied = copy.copy(layer)
    for name, part in vars(layer).items():
        setattr(copied, name, alone(part))
    if getattr(layer, "is_sliding", False) and layer.is_initialized:
        if valid is not None:
            layer_valid = valid[request, valid.shape[1] - layer.keys.shape[2] :]
            copied.keys, copied.values = copied.keys[:, :, layer_valid], copied.values[:, :, layer_valid]
        if copied.keys.shape[2] != min(length, layer.sliding_window - 1):
            raise KeepsetError(
                "A second pass of a model with sliding windows needs its padding at the left, and only there."
            )
        copied.cumulative_length = length
    return copied
