"""`LayerInput`: the input of one attention module, and the queries that the module makes from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from keepset.core.feature import QuerySource, Turn
from keepset.core.rope import inverse, matches_unrotated, mean_rotation, positions_ahead
from keepset.core.shapes import HiddenStates, Queries
from keepset.errors import UnsupportedModelError
from keepset.hf.autocast import Autocast, resumed

_CACHES = ("past_key_values", "layer_past")
"""Names under which attention modules take a cache."""
_SAMPLES, _FAR = 2, 21
"""The number of hidden states for probing a module, and of powers of two as positions where it may scale queries."""
_LAYOUTS: WeakKeyDictionary[nn.Module, RotaryLayout] = WeakKeyDictionary()
"""The rotation layout of each attention module that was probed."""


Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of every number of a query, `[batch, n, head_dim]`; see `RotaryLayout.rotation`."""

Probe = Callable[[Tensor, Tensor], Queries]
"""`(cosines, sines) [n, rotary_dim] -> [samples, query_heads, n, head_dim]`: queries of the same few hidden states,
each once per row of cosines and sines."""


@dataclass(frozen=True, eq=False)
class RotaryLayout:
    """Layout of a rotation: which two numbers of a query rotate together, and by which cosine and sine of the model.

    Attributes:
        cos, sin: for each number of a query, the indices of its cosine and its sine.
        partner: the number that each one rotates with.
        sign: the sign of the partner's part; 0 for numbers that are not rotated.
        scales: whether queries are also multiplied by a factor that depends on their position.
        changes: whether a position changes a query at all.
        in_order: whether each number has the cosine and the sine of its own index, and all rotate.
    """

    cos: Int[Tensor, " head_dim"]
    sin: Int[Tensor, " head_dim"]
    partner: Int[Tensor, " head_dim"]
    sign: Int[Tensor, " head_dim"]
    scales: bool
    changes: bool
    in_order: bool

    @classmethod
    def found(cls, probe: Probe, size: int, scales: bool) -> RotaryLayout:
        """Return the layout of a module.

        Rotation is linear in cosines and sines. So replaying the module with cosines and sines of 0 and 1, set by one
        bit of their indices at a time, shows where each of them goes. Zeros stay exact in every precision.

        A number may be 0 in every query, as a norm's scale of 0 makes it. Its partner tells how both rotate.

        Args:
            probe: returns the queries that the module makes of samples under one cosine and one sine for each token.
            size: how many cosines a token has.
            scales: whether the module also scales queries by position.
        """
        bits = torch.arange(size) >> torch.arange(size.bit_length())[:, None] & 1
        none, unit = torch.zeros(len(bits), size, dtype=torch.float32), torch.ones(1, size, dtype=torch.float32)
        cos = torch.cat([unit, 0 * unit, 0 * unit, bits, none])
        queries = probe(cos, torch.cat([0 * unit, 0 * unit, unit, none, bits])).float()
        plain, turned = (queries[:, :, at].abs().flatten(0, 1).T for at in (0, 2))
        nonzero = (queries != 0).any(0).any(0)
        still, (cos_bits, sin_bits) = nonzero[1], nonzero[3:].split(len(bits))
        partner = _partners(turned, plain, still)
        sign = (queries[:, :, 2] * queries[:, :, 0, partner]).sum((0, 1)).sign().int().masked_fill(still, 0)
        sign = sign.where(sign != 0, -sign[partner])
        worth = 2 ** torch.arange(len(bits), device=queries.device)[:, None]
        cos, sin = (
            (bit_mask * worth).sum(0).clamp(max=size - 1).masked_fill(still, 0) for bit_mask in (cos_bits, sin_bits)
        )
        cos, sin = cos.where(plain.any(-1), cos[partner]), sin.where(turned.any(-1), sin[partner])
        index = torch.arange(len(cos), device=cos.device)
        in_order = len(cos) == size and bool(((cos == index) & (sin == index) & ~still).all())
        changes, partner = scales or bool(sign.any()), partner.masked_fill(still, 0)
        with torch.inference_mode(False):  # kept for later calls, which may be outside of the caller's inference mode
            return cls(cos.clone(), sin.clone(), partner.clone(), sign.clone(), scales, changes, in_order)

    def rotation(
        self,
        cos: Float[Tensor, "batch n rotary_dim"],
        sin: Float[Tensor, "batch n rotary_dim"],
        scale: Float[Tensor, "batch n"] | None,
    ) -> Rotation:
        """Return the rotation that a model's cosines and sines make.

        Args:
            cos, sin: what the model's rotary embedding makes.
            scale: factor of the queries at each position; None if there is none.
        """
        if not self.in_order:
            cos, sin = cos[..., self.cos].masked_fill(self.sign == 0, 1), sin[..., self.sin]
        sin = sin * self.sign
        return (cos, sin) if scale is None else (cos * scale[..., None], sin * scale[..., None])

    def rotate(self, queries: Queries, rotation: Rotation) -> Queries:
        """Return rotated queries, in the wider of the queries' and the rotation's types.

        Args:
            queries: queries before rotation.
            rotation: what `rotation` has returned.
        """
        cos, sin = rotation
        # Queries in a narrower type are widened by the product, without a copy.
        return queries * cos[:, None] + queries[..., self.partner] * sin[:, None]


def _partners(
    turned: Float[Tensor, "head_dim rows"], plain: Float[Tensor, "head_dim rows"], still: Bool[Tensor, " head_dim"]
) -> Int[Tensor, " head_dim"]:
    """Return the number that each number of a query rotates with; each is the partner of its own partner.

    Args:
        turned: magnitudes of the numbers after a quarter turn: those of their partners.
        plain: magnitudes of the numbers themselves.
        still: which numbers do not rotate.
    """
    distance = torch.cdist(turned, plain, p=1).cpu()
    distance = (
        (distance + distance.T).masked_fill(still.cpu() | still.cpu()[:, None], torch.inf).fill_diagonal_(torch.inf)
    )
    partners = list(range(len(distance)))
    # Numbers that are the same in every query have several candidates: each takes the first that is free.
    for number in range(len(distance)):
        nearest = int(distance[number].argmin())
        if bool(distance[number, nearest].isfinite()):
            partners[number], partners[nearest] = nearest, number
            distance[:, [number, nearest]] = torch.inf
            distance[[number, nearest]] = torch.inf
    return torch.tensor(partners, dtype=torch.long, device=plain.device)


@dataclass
class ModuleCall:
    """One call of a module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


def hidden_states_of(call: ModuleCall) -> HiddenStates:
    """Return the hidden states that an attention module was called with, `[batch, n, hidden]`."""
    hidden: HiddenStates | None = call.kwargs.get("hidden_states")
    return call.args[0] if hidden is None else hidden


class QueryProbe:
    """Takes the place of a mask: keepset's attention function then reports the queries and attends to nothing.

    Attributes:
        queries: `[batch, query_heads, n, head_dim]`, after rotation.
    """

    queries: Tensor


class LayerInput(QuerySource):
    """The input of one attention module in one forward, for some of its requests, and the queries made of it.

    Args:
        call: the call of the attention module.
        rotary: the call of the rotary embedding whose output the module was given; None if there is none.
        query: the module's queries after rotation.
        positions: positions of the tokens, counted from each request's first.
        valid: which tokens are not padding; None if all are real.
        position_ids: the model's own positions, as the attention function got them.
        rows: the indices of these requests in the model's batch.
        autocast: the mixed precision in which the module was called; None without.
        absorb: the function that makes `query` from the module's queries; None if they are the same.

    Attributes:
        rotation: rotation of this forward's positions; None where the layer does not rotate.

    Raises:
        UnsupportedModelError: the module rotates queries in a way that cannot be undone.
    """

    @torch.no_grad()
    def __init__(
        self,
        call: ModuleCall,
        rotary: ModuleCall | None,
        query: Queries,
        positions: Int[Tensor, "batch n"],
        valid: Bool[Tensor, "batch n"] | None,
        position_ids: Tensor | None,
        rows: slice,
        autocast: Autocast | None,
        absorb: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._absorb, self._autocast = absorb, autocast
        # Without the cache: its observations may hold this.
        kwargs = {name: None if name in _CACHES else value for name, value in call.kwargs.items()}
        self._call, self._rows, self._positions, self._valid = replace(call, kwargs=kwargs), rows, positions, valid
        self._rotary, self._tokens = rotary, query.shape[2]
        self._given = (position_ids,) if rotary is None else (*rotary.args, *rotary.kwargs.values())
        layout = _LAYOUTS.get(call.module)
        self._layout = layout or self._found_layout()
        self.rotation = self._own_rotation()
        if layout is None:
            self._check(query)
            _LAYOUTS[call.module] = self._layout

    @cached_property
    def _offset(self) -> Int[Tensor, " batch"]:
        return position_offset(self._given, self._positions, self._valid, self._rows)

    @property
    def hidden(self) -> HiddenStates:
        """Hidden states that entered the module, `[batch, n, hidden]`."""
        return hidden_states_of(self._call)[self._rows]

    def rotated_by(self, rotation: Rotation | None) -> LayerInput:
        """Return the same layer's input for queries of other forwards, which this rotation has rotated."""
        rotated = copy.copy(self)
        rotated.rotation = None if self.rotation is None else rotation
        return rotated

    def newest(self) -> LayerInput:
        """Return the input of the last token alone, in memory of its own."""
        alone, copies = copy.copy(self), dict[int, Any]()
        vars(alone)["_offset"] = self._offset  # which its own positions may not tell, if it is padding
        alone._positions, alone._valid, alone._given, alone._tokens = self._positions[:, -1:].clone(), None, (), 1
        if self.rotation is not None:
            alone.rotation = self.rotation[0][:, -1:].clone(), self.rotation[1][:, -1:].clone()

        def newest(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(newest, value))
            if not isinstance(value, Tensor) or value.ndim < 1:
                return value
            if id(value) not in copies:  # a module may take its hidden states several times
                is_input = value.is_floating_point() or value.is_complex()
                axis = 1 if is_input and value.ndim > 1 else value.ndim - 1
                of_tokens = value.shape[axis] == self._tokens and (is_input or value.dtype != torch.bool)
                copies[id(value)] = value.narrow(axis, self._tokens - 1, 1).clone() if of_tokens else value
            return copies[id(value)]

        def of_call(call: ModuleCall) -> ModuleCall:
            kwargs = {name: newest(value) for name, value in call.kwargs.items()}
            return ModuleCall(call.module, newest(call.args), kwargs)

        alone._call = of_call(self._call)
        # Of masks a replay takes only their kinds, and they are as large as the prompt squared.
        masks = alone._call.kwargs.pop("attention_mask", None)
        if isinstance(masks, dict):
            alone._call.kwargs["attention_mask"] = {
                name: None if isinstance(mask, Tensor | None) else ... for name, mask in masks.items()
            }
        alone._rotary = None if self._rotary is None else of_call(self._rotary)
        return alone

    def undo(self, queries: Queries, positions: Int[Tensor, "batch n"]) -> Queries:
        return self._unrotate(queries, 0)

    def ahead(self, lengths: Int[Tensor, " batch"], future: int) -> Turn:
        rotation = self._future_rotation(lengths, future)
        return lambda rows: rows if rotation is None else self._layout.rotate(rows, rotation)

    def queries(self, hidden: HiddenStates, lengths: Int[Tensor, " batch"], future: int) -> Queries:
        return self.ahead(lengths, future)(self._replay(hidden).float())

    def _unrotate(self, queries: Queries, first: int) -> Queries:
        """Return queries before their rotation, in float32.

        Args:
            queries: after rotation.
            first: the index of their first token in this forward.
        """
        if self.rotation is None:
            return queries.float()
        cos, sin = (part[:, first : first + queries.shape[2]].float() for part in self.rotation)
        return self._layout.rotate(queries, inverse(cos, sin)).float()

    def _own_rotation(self) -> Rotation | None:
        """Return the rotation of this forward's tokens."""
        if not self._layout.changes:
            return None
        embedded = self._call.kwargs.get("position_embeddings")
        rotation = _no_rotation(self._positions, self.hidden) if embedded is None else cos_and_sin(embedded)
        cos, sin = (part if len(part) == 1 else part[self._rows] for part in rotation)
        if not self._layout.scales:
            return self._layout.rotation(cos, sin, None)
        true_positions = (self._positions + self._offset[:, None]).clamp(
            min=0
        )  # padding before the first token has none
        return self._layout.rotation(cos, sin, self._scale(true_positions))

    def _future_rotation(self, lengths: Int[Tensor, " batch"], future: int) -> Rotation | None:
        """Return the mean rotation of the next positions of each request; None if the module does not rotate.

        Args:
            lengths: tokens of each request.
            future: how many positions.
        """
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
            # A rotary embedding takes type and device from hidden states: float32 angles are not rounded.
            if isinstance(value, Tensor) and value.is_floating_point():
                return value[:, :1].float()
            return value if _length(value) is None else _at_positions(value, positions)

        # A copy with buffers of its own: some rotary embeddings adapt their frequencies to the longest position
        # that they have seen. `forward`, because calling the module would run the hooks that remember calls.
        rotary = copy.copy(self._rotary.module)
        rotary._buffers = dict(rotary._buffers)
        args, kwargs = self._rotary.args, self._rotary.kwargs
        return cos_and_sin(rotary.forward(*map(ahead, args), **{name: ahead(value) for name, value in kwargs.items()}))

    def _replay(
        self, hidden: HiddenStates, positions: Int[Tensor, "batch n"] | None = None, rotation: Rotation | None = None
    ) -> Queries:
        """Return the queries that the module makes of other hidden states: it runs again, with norms and biases.

        Args:
            hidden: what the module is called with.
            positions: of the tokens, where they matter; all 0 if None.
            rotation: cosines and sines for the module; None for no rotation.
        """
        batch, n, _ = hidden.shape
        at = torch.zeros(batch, n, dtype=torch.long, device=hidden.device) if positions is None else positions
        module_input, probe = hidden_states_of(self._call), QueryProbe()
        hidden = hidden.to(module_input.dtype)

        def instead(name: str, value: Any) -> Any:
            if value is module_input:  # which some modules take several times
                return hidden.contiguous()
            if name == "position_embeddings" and value is not None:
                size = cos_and_sin(value)[0].shape[-1]
                cos_sin = rotation or (hidden.new_ones(n, size), hidden.new_zeros(n, size))
                cos, sin = (part.to(hidden).expand(batch, -1, -1) for part in cos_sin)
                return torch.complex(cos.float(), sin.float()) if isinstance(value, Tensor) else (cos, sin)
            if isinstance(value, MutableMapping):  # which the module may write to
                return copy.copy(value)
            return _at_positions(value, at) if _length(value) == self._tokens else value

        args = [instead("", value) for value in self._call.args]
        kwargs = {name: instead(name, value) for name, value in self._call.kwargs.items()}
        masks = self._call.kwargs.get("attention_mask")
        if isinstance(masks, dict):  # several kinds, of which tensors belong to other tokens
            kwargs["attention_mask"] = {
                name: None if isinstance(mask, Tensor | None) else probe for name, mask in masks.items()
            }
        else:
            kwargs["attention_mask"] = probe
        with resumed(self._autocast):
            self._call.module.forward(*args, **kwargs)
        return probe.queries if self._absorb is None else self._absorb(probe.queries)

    def _samples(self, count: int) -> HiddenStates:
        """Return random hidden states of one token each."""
        draw = torch.Generator().manual_seed(0)
        return torch.randn(count, 1, self.hidden.shape[-1], generator=draw, dtype=torch.float32).to(self.hidden)

    def _scale(self, positions: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n"] | None:
        """Return the factor of queries at these positions; None where the module has no such factor."""
        if not self._layout.scales:
            return None
        sample = self._samples(1)
        plain = self._replay(sample).float()
        scaled = self._replay(sample.expand(*positions.shape, -1), positions).float()
        return (scaled * plain).sum((1, 3)) / plain.square().sum((1, 3))

    def _computed_in(self, product: Tensor) -> torch.dtype:
        """Return the type of the products that made a tensor."""
        return product.dtype if self._autocast is None else self._autocast.dtype

    def _found_layout(self) -> RotaryLayout:
        """Return how the module rotates queries, found by replaying it."""
        samples, far = self._samples(_SAMPLES), 2 ** torch.arange(_FAR, device=self.hidden.device)
        embeddings = self._call.kwargs.get("position_embeddings")

        def probe(cos: Tensor, sin: Tensor) -> Queries:
            return self._replay(samples.expand(-1, len(cos), -1), rotation=(cos, sin))

        plain = self._replay(samples[:1]).float()
        at_far = self._replay(samples[:1].expand(-1, _FAR, -1), far[None])
        scales = not matches_unrotated(at_far, plain.expand_as(at_far), self._computed_in(samples))
        return RotaryLayout.found(probe, 1 if embeddings is None else cos_and_sin(embeddings)[0].shape[-1], scales)

    def _check(self, queries: Queries) -> None:
        """Compare the newest queries, rotated back, with what the module itself makes without rotation."""
        first = max(self._tokens - 4, 0)
        undone = self._unrotate(queries[:, :, first:], first)
        alone = self._replay(self.hidden[:, first : self._tokens]).float()
        if matches_unrotated(undone, alone, self._computed_in(queries)):
            return
        among = self._replay(self.hidden[:, : self._tokens])[:, :, first:].float()
        reason = "makes its queries in a way that keepset cannot undo"
        if not matches_unrotated(among, alone, self._computed_in(queries)):  # as under dynamic quantization
            reason = "rounds a token's query by what else is in the call"
        raise UnsupportedModelError(
            f"{type(self._call.module).__name__} {reason}; methods that look at future queries do not support this "
            "model."
        )


def cos_and_sin(embeddings: Any) -> Rotation:
    """Return cosines and sines of what a rotary embedding makes: these two, or complex numbers."""
    cos, sin = (embeddings.real, embeddings.imag) if isinstance(embeddings, Tensor) else embeddings
    return cos, sin


def position_offset(
    candidates: Iterable[Any],
    positions: Int[Tensor, "batch n"],
    valid: Bool[Tensor, "batch n"] | None,
    rows: slice = slice(None),
) -> Int[Tensor, " batch"]:
    """Return the model's position of each request's newest token less the number of tokens before it.

    An image takes fewer positions than tokens: the next one follows the largest along any axis. Padding may take some.

    Args:
        candidates: a call's arguments, of which the first with a position for each token is taken.
        positions: positions of the tokens, counted from each request's first.
        valid: which tokens are no padding; None if all are.
        rows: the rows of the model's batch in which these requests are.
    """
    model_positions = next((candidate for candidate in candidates if _length(candidate) == positions.shape[1]), None)
    if model_positions is None:
        return positions.new_zeros(len(positions))
    model_positions = (
        model_positions[None]
        if model_positions.ndim == 1
        else model_positions.flatten(0, -3).amax(0)
        if model_positions.ndim > 2
        else model_positions
    )
    ahead = (model_positions if len(model_positions) == 1 else model_positions[rows]).to(positions.device) - positions
    if valid is None:
        return ahead[:, -1]
    order = torch.arange(positions.shape[1], device=positions.device)
    return ahead.gather(1, (order * valid).argmax(-1, keepdim=True))[:, 0]


def _no_rotation(positions: Int[Tensor, "batch n"], like: Tensor) -> Rotation:
    cosines = like.new_ones(*positions.shape, 1)
    return cosines, torch.zeros_like(cosines)


def _length(value: Any) -> int | None:
    """Return the number of positions in a value; None if it holds no positions."""
    if isinstance(value, Tensor) and value.ndim and not (value.is_floating_point() or value.is_complex()):
        return None if value.dtype == torch.bool else value.shape[-1]
    return None


def _at_positions(value: Tensor, positions: Int[Tensor, "batch n"]) -> Tensor:
    """Return these positions in the shape of the model's own: one row, one per request, or one per axis."""
    return positions[0] if value.ndim == 1 else positions.expand(*value.shape[:-2], -1, -1)
