"""What only the attention module's caller knows: its input, and how positions are rotated."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keepset.core.accumulator import QuerySource, Turn
from keepset.core.rope import inverse, matches_unrotated, mean_rotation, positions_ahead
from keepset.core.shapes import HiddenStates, Queries
from keepset.errors import UnsupportedModelError
from keepset.hf.attention import AttentionCall, capturing
from keepset.hf.hooks import ModelHooks, after_calls, before_calls
from keepset.hf.mask import RealTokens
from keepset.hf.rotation import RotaryLayout, Rotation

_CACHES = ("past_key_values", "layer_past")


@dataclass
class _Call:
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    @property
    def given(self) -> tuple[Any, ...]:
        return *self.args, *self.kwargs.values()


class _Calls(threading.local):
    """The calls that one thread has made and that are under way.

    Attributes:
        attention: of an attention module.
        rotary: of rotary embeddings; two, because models with two kinds of layers make two rotations per forward.
    """

    attention: _Call | None = None
    rotary: tuple[_Call, ...] = ()


_LAYOUTS: WeakKeyDictionary[nn.Module, RotaryLayout] = WeakKeyDictionary()
"""How attention modules rotate their queries, of those that were asked."""


class AttentionHooks(ModelHooks):
    """Remember the newest call of an attention module and of rotary embeddings, for methods that look at such.

    They see the calls with other caches, too, and hold nothing of any call once it is over, also if it has failed.
    """

    def forget(self) -> None:
        self._newest = _Calls()

    def fork(self, past: Any) -> Self:
        copied = super().fork(past)
        copied._newest = _Calls()  # each sees every call of the model
        return copied

    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]:
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                yield before_calls(module, self._enter)
                yield after_calls(module, self._leave, failed=True)
            elif _is_rotary(module):
                yield after_calls(module, self._rotated)
            if any(map(_is_rotary, module.children())):
                yield after_calls(module, self._done, failed=True)

    def layer_input(
        self, call: AttentionCall, positions: Int[Tensor, "batch n"], real: RealTokens | None
    ) -> LayerInput:
        """Return the input of the attention module whose call is under way, of some of the model's requests.

        Args:
            call: of the attention function.
            positions: of its tokens, counted from each request's first.
            real: which tokens are no padding; None when all are.

        Raises:
            UnsupportedModelError: the input was not seen, or how the module rotates queries cannot be found out.
        """
        module, seen = call.module, self._newest.attention
        if seen is None or seen.module is not module:
            raise UnsupportedModelError(
                f"keepset could not see the input of {type(module).__name__}; methods that look at hidden states "
                "do not support this model."
            )
        rotary = None
        if (rotation := seen.kwargs.get("position_embeddings")) is not None:
            rotary = next((each for each in self._newest.rotary if each.output[0] is rotation[0]), None)
            if rotary is None or rotation[0].ndim != 3:
                raise UnsupportedModelError(
                    f"keepset could not find the rotary embedding of {type(module).__name__}; methods that look "
                    "at future queries do not support this model."
                )
        return LayerInput(seen, rotary, call, positions, real)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._newest.attention = _Call(module, args, kwargs)

    def _rotated(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._newest.rotary = (*self._newest.rotary[-1:], _Call(module, args, kwargs, output))

    def _leave(self, *_: Any) -> None:
        self._newest.attention = None

    def _done(self, *_: Any) -> None:
        self._newest.rotary = ()


def _is_rotary(module: nn.Module) -> bool:
    return "RotaryEmbedding" in type(module).__name__


class LayerInput(QuerySource):
    """The input of one attention module in one forward, of some of its requests, and what can be computed from it.

    Attributes:
        rotation: of this forward's positions; None where the layer does not rotate.
    """

    def __init__(
        self,
        seen: _Call,
        rotary: _Call | None,
        call: AttentionCall,
        positions: Int[Tensor, "batch n"],
        real: RealTokens | None,
    ) -> None:
        # Without the cache, whose observations may hold this.
        kwargs = {name: None if name in _CACHES else value for name, value in seen.kwargs.items()}
        self._call, self._rotary, self._rows = replace(seen, kwargs=kwargs), rotary, call.rows
        self._positions, self._valid = positions, None if real is None else real.mask
        self._given, self._tokens = (call.position_ids,) if rotary is None else rotary.given, call.query.shape[2]
        known = _LAYOUTS.get(call.module)
        self._layout = known or self._found_layout()
        self.rotation = self._own_rotation()
        if known is None:
            self._check(call.query)
            _LAYOUTS[call.module] = self._layout

    @cached_property
    def _offset(self) -> Int[Tensor, " batch"]:
        return position_offset(self._given, self._positions, self._valid, self._rows)

    @property
    def hidden(self) -> HiddenStates:
        hidden = self._call.kwargs.get("hidden_states")
        return (self._call.args[0] if hidden is None else hidden)[self._rows]

    def rotated_by(self, rotation: Rotation | None) -> LayerInput:
        """The same layer's input for queries of other forwards, which this rotation has rotated."""
        other = copy.copy(self)
        other.rotation = None if self.rotation is None else rotation
        return other

    def undo(self, queries: Queries, positions: Int[Tensor, "batch n"]) -> Queries:
        return self._unrotate(queries, 0)

    def ahead(self, lengths: Int[Tensor, " batch"], future: int) -> Turn:
        rotation = self._future_rotation(lengths, future)
        return lambda rows: rows if rotation is None else self._layout.rotate(rows, rotation)

    def queries(self, hidden: HiddenStates, lengths: Int[Tensor, " batch"], future: int) -> Queries:
        return self.ahead(lengths, future)(self._replay(hidden).float())

    def _unrotate(self, queries: Queries, first: int) -> Queries:
        if self.rotation is None:
            return queries.float()
        cos, sin = (part[:, first : first + queries.shape[2]].float() for part in self.rotation)
        return self._layout.rotate(queries.float(), inverse(cos, sin))

    def _own_rotation(self) -> Rotation | None:
        """Return the rotation of this forward's tokens."""
        if not self._layout.changes:
            return None
        given = self._call.kwargs.get("position_embeddings") or _no_rotation(self._positions, self.hidden)
        cos, sin = (part if len(part) == 1 else part[self._rows] for part in given)
        if not self._layout.scales:
            return self._layout.rotation(cos, sin, None)
        own = (self._positions + self._offset[:, None]).clamp(min=0)  # padding before the first token has none
        return self._layout.rotation(cos, sin, self._scale(own))

    def _future_rotation(self, lengths: Int[Tensor, " batch"], future: int) -> Rotation | None:
        """Means over the `future` positions from `lengths` on: rotating with them is the mean of the rotations."""
        if self.rotation is None:
            return None
        positions = positions_ahead(lengths + self._offset, future)
        cos, sin = self._embedded(positions) or _no_rotation(positions, self.hidden)
        return mean_rotation(*self._layout.rotation(cos.float(), sin.float(), self._scale(positions)))

    def _embedded(self, positions: Int[Tensor, "batch n"]) -> Rotation | None:
        """Return cosines and sines of these positions, as the model makes them; None where it makes none."""
        if self._rotary is None:
            return None

        def ahead(value: Any) -> Any:
            # Of hidden states a rotary embedding takes the type and the device: float32 angles are not rounded.
            if isinstance(value, Tensor) and value.is_floating_point():
                return value[:, :1].float()
            return value if _length(value) is None else at_positions(value, positions)

        # A copy with buffers of its own: some rotary embeddings adapt their frequencies to the longest position
        # that they have seen. `forward`, because calling the module would run the hooks that remember calls.
        rotary = copy.copy(self._rotary.module)
        rotary._buffers = dict(rotary._buffers)
        args, kwargs = self._rotary.args, self._rotary.kwargs
        cos, sin = rotary.forward(*map(ahead, args), **{name: ahead(value) for name, value in kwargs.items()})
        return cos, sin

    def _replay(
        self, hidden: HiddenStates, positions: Int[Tensor, "batch n"] | None = None, rotation: Rotation | None = None
    ) -> Queries:
        """Return the queries that the module makes of other hidden states: it runs again, with norms, biases and all.

        Args:
            hidden: of any number of tokens and requests.
            positions: of the tokens, for modules that look at them; None: all are at position 0.
            rotation: cosines and sines as the model makes them, `[n, rotary_dim]`; None: the tokens are not rotated.
        """
        batch, n, _ = hidden.shape
        at = torch.zeros(batch, n, dtype=torch.long, device=hidden.device) if positions is None else positions

        own = self._call.kwargs.get("hidden_states")
        own = self._call.args[0] if own is None else own

        def instead(name: str, value: Any) -> Any:
            if value is own:  # which some modules take several times
                return hidden.contiguous()
            if name == "position_embeddings" and value is not None:
                size = value[0].shape[-1]
                given = rotation or (hidden.new_ones(n, size), hidden.new_zeros(n, size))
                return tuple(part.to(hidden).expand(batch, -1, -1) for part in given)
            if isinstance(value, dict):  # which the module may write to
                return dict(value)
            return at_positions(value, at) if _length(value) == self._tokens else value

        args = [instead("", value) for value in self._call.args]
        kwargs = {name: instead(name, value) for name, value in self._call.kwargs.items()}
        kwargs["attention_mask"] = None
        with capturing() as captured:
            self._call.module.forward(*args, **kwargs)
        return captured[0]

    def _samples(self, count: int) -> HiddenStates:
        """Return random hidden states of one token each."""
        draw = torch.Generator().manual_seed(0)
        return torch.randn(count, 1, self.hidden.shape[-1], generator=draw).to(self.hidden)

    def _scale(self, positions: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n"] | None:
        """Return what the module multiplies queries at these positions with; None where it does nothing of the kind."""
        if not self._layout.scales:
            return None
        sample = self._samples(1)
        plain = self._replay(sample).float()
        there = self._replay(sample.expand(*positions.shape, -1), positions).float()
        return (there * plain).sum((1, 3)) / plain.square().sum((1, 3))

    def _found_layout(self) -> RotaryLayout:
        samples, far = self._samples(_SAMPLES), 2 ** torch.arange(_FAR, device=self.hidden.device)
        embeddings = self._call.kwargs.get("position_embeddings")

        def probe(cos: Tensor, sin: Tensor) -> Queries:
            return self._replay(samples.expand(-1, len(cos), -1), rotation=(cos, sin))

        plain = self._replay(samples[:1]).float()
        there = self._replay(samples[:1].expand(-1, _FAR, -1), far[None])
        scales = not matches_unrotated(there, plain.expand_as(there), samples.dtype)
        return RotaryLayout.found(probe, 1 if embeddings is None else embeddings[0].shape[-1], scales)

    def _check(self, queries: Queries) -> None:
        """Compare the newest queries, once they are undone, with what the module itself makes without rotation."""
        first = max(self._tokens - 4, 0)
        undone = self._unrotate(queries[:, :, first:], first)
        if not matches_unrotated(undone, self._replay(self.hidden[:, first : self._tokens]).float(), queries.dtype):
            raise UnsupportedModelError(
                f"{type(self._call.module).__name__} rotates queries in a way that keepset cannot undo; methods "
                "that look at future queries do not support this model."
            )


_SAMPLES, _FAR = 2, 21
"""Hidden states that a module is asked about; and powers of two, as positions at which it may scale queries."""


def _no_rotation(positions: Int[Tensor, "batch n"], like: Tensor) -> Rotation:
    """Return the one cosine and sine of tokens that are not rotated."""
    ones = like.new_ones(*positions.shape, 1)
    return ones, torch.zeros_like(ones)


def _length(value: Any) -> int | None:
    """Return how many positions these are; None where they are none."""
    if isinstance(value, Tensor) and value.ndim and not (value.is_floating_point() or value.is_complex()):
        return None if value.dtype == torch.bool else value.shape[-1]
    return None


def at_positions(value: Tensor, positions: Int[Tensor, "batch n"]) -> Tensor:
    """Return these positions in the shape that the model gives its own: one row, one each, or one for each axis."""
    return positions[0] if value.ndim == 1 else positions.expand(*value.shape[:-2], -1, -1)


def position_offset(
    given: Iterable[Any],
    positions: Int[Tensor, "batch n"],
    valid: Bool[Tensor, "batch n"] | None,
    rows: slice = slice(None),
) -> Int[Tensor, " batch"]:
    """Return how far the model's own position of each request's newest token is from the number of tokens before it.

    An image takes fewer positions than tokens: the next one follows the largest along any axis. Padding may take some.

    Args:
        given: the arguments of a rotary embedding or an attention module, its position ids among them.
        positions: of the tokens, counted from each request's first.
        valid: which tokens are no padding; None when all are.
        rows: the requests, among those that the model was called with.
    """
    own = next((each for each in given if _length(each) == positions.shape[1]), None)
    if own is None:
        return positions.new_zeros(len(positions))
    own = own[None] if own.ndim == 1 else own.flatten(0, -3).amax(0) if own.ndim > 2 else own
    ahead = (own if len(own) == 1 else own[rows]).to(positions.device) - positions
    if valid is None:
        return ahead[:, -1]
    order = torch.arange(positions.shape[1], device=positions.device)
    return ahead.gather(1, (order * valid).argmax(-1, keepdim=True))[:, 0]
