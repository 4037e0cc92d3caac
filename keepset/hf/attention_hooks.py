"""What only the attention module's caller knows: its input, and how positions are rotated."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keepset.core.accumulator import QuerySource, Turn
from keepset.core.rope import inverse, mean_rotation, positions_ahead, undone_right
from keepset.core.shapes import HiddenStates, Queries
from keepset.errors import UnsupportedModelError
from keepset.hf.attention import capturing
from keepset.hf.hooks import ModelHooks, weakly

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, `[batch, n, rotary_dim]`."""
_CACHES = ("past_key_values", "layer_past")


@dataclass
class _Call:
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


class _Calls(threading.local):
    """The calls that are under way in one thread."""

    def __init__(self) -> None:
        self.attention: _Call | None = None
        self.rotary: list[_Call] = []


_ROTATES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether an attention module rotates its queries, of those whose rotation was compared."""


class AttentionHooks(ModelHooks):
    """Remember the newest call of an attention module and of rotary embeddings, for methods that look at such.

    They see the calls with other caches, too, and hold nothing of any call once it is over, also if it has failed.
    """

    def forget(self) -> None:
        self._local = _Calls()

    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]:
        enter, leave = weakly(self._enter), weakly(self._leave)
        rotated, done = weakly(self._rotated), weakly(self._done)
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                yield module.register_forward_pre_hook(enter, with_kwargs=True)
                yield module.register_forward_hook(leave, always_call=True)
            elif _is_rotary(module):
                yield module.register_forward_hook(rotated, with_kwargs=True)
            if any(map(_is_rotary, module.children())):
                yield module.register_forward_hook(done, always_call=True)

    def layer_input(self, module: nn.Module, rows: slice = slice(None)) -> LayerInput:
        """The input of the call of `module` that is under way, of some of its requests."""
        call = self._local.attention
        if call is None or call.module is not module:
            raise UnsupportedModelError(
                f"keepset could not see the input of {type(module).__name__}; methods that look at hidden states "
                "do not support this model."
            )
        rotation = call.kwargs.get("position_embeddings")
        if rotation is None:
            return LayerInput(call, None, rows)
        rotary = next((each for each in self._local.rotary if each.output[0] is rotation[0]), None)
        if rotary is None:
            raise UnsupportedModelError(
                f"keepset could not find the rotary embedding of {type(module).__name__}; methods that look "
                "at future queries do not support this model."
            )
        return LayerInput(call, rotary, rows)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._local.attention = _Call(module, args, kwargs)

    def _rotated(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # Two are enough: models with two kinds of layers make two rotations per forward.
        self._local.rotary = [*self._local.rotary[-1:], _Call(module, args, kwargs, output)]

    def _leave(self, *_: Any) -> None:
        self._local.attention = None

    def _done(self, *_: Any) -> None:
        self._local.rotary = []


def _is_rotary(module: nn.Module) -> bool:
    return "RotaryEmbedding" in type(module).__name__


class LayerInput(QuerySource):
    """The input of one attention module in one forward, of some of its requests, and what can be computed from it.

    Attributes:
        rotation: of this forward's positions; None where the layer does not rotate.
    """

    def __init__(self, call: _Call, rotary: _Call | None, rows: slice) -> None:
        # Without the cache, whose observations may hold this.
        kwargs = {name: None if name in _CACHES else value for name, value in call.kwargs.items()}
        self._call, self._rotary, self._rows = replace(call, kwargs=kwargs), rotary, rows
        rotation = kwargs.get("position_embeddings")
        self.rotation: Rotation | None = None if rotation is None else (rotation[0][rows], rotation[1][rows])

    @property
    def hidden(self) -> HiddenStates:
        hidden = self._call.kwargs.get("hidden_states")
        return (self._call.args[0] if hidden is None else hidden)[self._rows]

    def rotated_by(self, rotation: Rotation | None) -> LayerInput:
        """The same layer's input for queries of other forwards, which this rotation has rotated."""
        other = copy.copy(self)
        other.rotation = None if self.rotation is None else rotation
        return other

    def _future_rotation(self, lengths: Int[Tensor, " batch"], future: int) -> Rotation | None:
        """Means over the `future` positions from `lengths` on: rotating with them is the mean of the rotations."""
        if self._rotary is None or self.rotation is None:
            return None
        positions = positions_ahead(lengths, future)

        def ahead(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            # Of hidden states a rotary embedding takes the type and the device: float32 angles are not rounded.
            return value[:, :1].float() if value.is_floating_point() else positions

        # A copy with buffers of its own: some rotary embeddings adapt their frequencies to the longest position
        # that they have seen. `forward`, because calling the module would run the hooks that remember calls.
        rotary = copy.copy(self._rotary.module)
        rotary._buffers = dict(rotary._buffers)
        call = self._rotary
        cos, sin = rotary.forward(*map(ahead, call.args), **{k: ahead(v) for k, v in call.kwargs.items()})
        return mean_rotation(cos.float(), sin.float())

    def _replay(self, hidden: HiddenStates, rotation: Rotation | None) -> Queries:
        """Queries that the module makes of other hidden states: it runs again, with its norms, biases and all."""
        args, kwargs = self._call.args, {**self._call.kwargs, "attention_mask": None}
        if rotation is not None:
            kwargs["position_embeddings"] = tuple(part.to(hidden.dtype) for part in rotation)
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = hidden
        else:
            args = (hidden, *args[1:])
        with capturing() as captured:
            self._call.module.forward(*args, **kwargs)
        return captured[0]

    def _unrotate(self, queries: Queries, first: int) -> Queries:
        if self.rotation is None:
            return queries.float()
        cos, sin = (part[:, first : first + queries.shape[2]].float() for part in self.rotation)
        return self._rotate(queries.float(), inverse(cos, sin))

    def undo(self, queries: Queries, positions: Int[Tensor, "batch n"]) -> Queries:
        return self._unrotate(queries, 0)

    def ahead(self, lengths: Int[Tensor, " batch"], future: int) -> Turn:
        rotation = self._future_rotation(lengths, future)
        return lambda rows: self._rotate(rows, rotation)

    def queries(self, hidden: HiddenStates, lengths: Int[Tensor, " batch"], future: int) -> Queries:
        return self._replay(hidden, self._future_rotation(lengths, future))

    def _rotate(self, queries: Queries, rotation: Rotation | None) -> Queries:
        if rotation is None:
            return queries
        # The model's own function, so its layout and its share of rotated dimensions.
        function = getattr(sys.modules[type(self._call.module).__module__], "apply_rotary_pos_emb", None)
        if function is None:
            raise UnsupportedModelError(
                f"keepset could not find how {type(self._call.module).__name__} rotates queries; methods that "
                "look at future queries do not support this model."
            )
        return function(queries, queries[:, :0], *rotation)[0]

    def check_rotation(self, queries: Queries) -> None:
        """Compares a few queries with what the module itself makes without rotation.

        Unrotated ones must be equal; where they are equal as they are, this layer does not rotate, as in some models.
        A module is asked once: what it says makes the host wait.
        """
        if self.rotation is None:
            return
        module = self._call.module
        if module not in _ROTATES:
            _ROTATES[module] = self._is_rotated(queries)
        if not _ROTATES[module]:
            self.rotation = None

    def _is_rotated(self, queries: Queries) -> bool:
        assert self.rotation is not None
        # The last: those at position 0, such as padding, are not rotated by any layer.
        first = max(queries.shape[2] - 4, 0)
        few, hidden = queries[:, :, first:], self.hidden[:, first : queries.shape[2]]
        cos, sin = (part[:, first : queries.shape[2]] for part in self.rotation)
        plain = self._replay(hidden, (torch.ones_like(cos), torch.zeros_like(sin))).float()
        # The module may give its rotation only a part of each query.
        with suppress(RuntimeError):
            if undone_right(self._unrotate(few, first), plain, queries.dtype):
                return True
        if not undone_right(few, plain, queries.dtype):
            raise UnsupportedModelError(
                f"{type(self._call.module).__name__} rotates queries in a way that keepset cannot undo; methods "
                "that look at future queries do not support this model."
            )
        return False
