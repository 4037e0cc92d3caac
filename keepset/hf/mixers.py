"""`mend_mixers`: several tokens after a state, for mixers that go on from theirs only if one token comes.

Some of transformers' mixers (Jamba's, Zamba's) begin anew if several tokens come together, as those of a question, of a
part of a prompt or of a second pass do. They are given these tokens one by one.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache as TransformersCache

from keepset.hf.attention import uncompiled
from keepset.hf.other_layers import states_of

_forgetful: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a mixer ignores a state if several tokens come; it is tried at the first call of this kind."""
_MENDED = "_keepset_mends_states"
"""Attribute of a mixer that has the hooks."""
_LATER = "_keepset_later_tokens"
"""Attribute of a first token's hidden states: the arguments of the calls that follow."""


def mend_mixers(model: nn.Module) -> None:
    """Make a model's mixers go on from their states whatever the number of tokens, from now on and with any cache.

    The hooks hold nothing of a cache, so they stay.
    """
    for module in model.modules():
        if _is_mixer(type(module)) and not hasattr(module, _MENDED):
            setattr(module, _MENDED, True)
            module.register_forward_pre_hook(_first_token, with_kwargs=True)
            module.register_forward_hook(_later_tokens, with_kwargs=True)


@cache
def _is_mixer(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class hold states; transformers gives mixers a cache by this name."""
    return "cache_params" in inspect.signature(kind.forward).parameters


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
        past = TransformersCache(layers=[*layers[:index], layer, *layers[index + 1 :]])
        return module.forward(**_part(call, slice(0, 2)), cache_params=past)

    kinds = [(kind, getattr(layers[index], kind)) for kind in ("conv_states", "recurrent_states")]
    held = [(kind, number) for kind, states in kinds for number, state in states.items() if state is not None]
    expected = outputs()
    return any(torch.equal(expected, outputs(kind, number)) for kind, number in held)


def _part(call: dict[str, Any], tokens: slice) -> dict[str, Any]:
    """Return the arguments for some of the tokens, without the cache."""
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
