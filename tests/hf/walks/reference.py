"""The reference: all that a request has had, and which of it every head may look at. It shares no code with keepset.

A request runs alone and without padding. It takes from the cache under test which positions were kept, and, where a
recipe changes what stays (`match`, `quantized`), the values that are stored.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from tests.hf.models import tiny, weights_of
from tests.kernels import few_bits


@dataclass(frozen=True)
class Layer:
    """Everything that passed, `[kv_heads, tokens, ...]`, and what of it may be looked at."""

    keys: Tensor
    values: Tensor
    bias: Tensor
    seen: Tensor


@dataclass(frozen=True)
class Row:
    """One request. Nothing of it is ever written into, so copies share it."""

    tokens: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    layers: dict[int, Layer] = field(default_factory=dict)
    rounded: bool = False
    events: tuple[tuple[int, dict[int, list[Tensor]]], ...] = ()

    def before(self, column: int) -> int:
        """Return how many tokens stand before a column of the batch."""
        return sum(at < column for at in self.columns)

    def kept(self, event: dict[int, list[Tensor]], column: int) -> Row:
        """Return the request after an event at this column that has kept these positions of each layer and head."""
        until, layers = self.before(column), dict(self.layers)
        for index, heads in event.items():
            seen = layers[index].seen.clone()
            for head, positions in enumerate(heads):
                assert bool((positions < until).all()), f"layer {index} has kept what follows the event"
                assert bool(seen[head, positions].all()), f"layer {index} has kept what was dropped before"
                seen[head, :until] = False
                seen[head, positions] = True
            layers[index] = replace(layers[index], seen=seen)
        return replace(self, layers=layers, events=(*self.events, (column, event)))

    def without(self, column: int) -> Row:
        """Return the request as it was before this column."""
        n = self.before(column)
        layers = {
            index: Layer(*(part[:, :n] for part in (each.keys, each.values, each.bias, each.seen)))
            for index, each in self.layers.items()
        }
        return replace(self, tokens=self.tokens[:n], columns=self.columns[:n], layers=layers if n else {})


@dataclass
class _Forward:
    row: Row
    columns: list[int]
    stored: dict[int, list[dict[int, tuple[Tensor, Tensor | None]]]]
    layers: dict[int, Layer] = field(default_factory=dict)
    guessed: bool = False


class _Now:
    """What the attention function below is told."""

    forward: _Forward


@cache
def reference_model(name: str, half: bool) -> Any:
    """The model of the reference, in float32 whatever that under test is in."""
    model = copy.deepcopy(tiny(name))
    if half:
        model = model.to(torch.bfloat16).float()
    model.set_attn_implementation("walks")
    return model


@torch.no_grad()
def feed(
    model: Any, row: Row, tokens: list[int], columns: list[int], stored: dict[int, Any] | None = None
) -> tuple[Row, Tensor, bool]:
    """Run a request's next tokens."""
    _Now.forward = forward = _Forward(row, columns, stored or {})
    start = len(row.tokens)
    positions = torch.arange(start, start + len(tokens))[None]
    logits = model(torch.tensor([tokens]), position_ids=positions, use_cache=False).logits[0]
    after = replace(row, tokens=(*row.tokens, *tokens), columns=(*row.columns, *columns), layers=forward.layers)
    return after, logits, forward.guessed


def round_to_8_bits(rows: Tensor) -> Tensor:
    """Every row, mixed, as multiples of a 127th of its largest number, and mixed back."""
    rows_mixed = _mixed(rows)
    step = rows_mixed.abs().amax(-1, keepdim=True) / 127
    nearest = torch.where(step > 0, (rows_mixed / step.clamp(min=1e-30)).round() * step, rows_mixed)
    return nearest @ _matrix(rows.shape[-1]).to(rows.dtype)


def are_nearest(stored: Tensor, rows: Tensor) -> bool:
    """Whether what is read of stored rows is the nearest that 8 bits can say."""
    rows_mixed = _mixed(rows)
    step = rows_mixed.abs().amax(-1, keepdim=True) / 127
    return bool(((_mixed(stored) - rows_mixed).abs() <= 0.51 * step + 1e-4).all())


def _mixed(rows: Tensor) -> Tensor:
    """Rows as they are rounded."""
    return rows @ _matrix(rows.shape[-1]).T.to(rows.dtype)


_matrix = cache(few_bits.matrix)


def _as_stored(forward: _Forward, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """New keys and values as the cache has them; where they are not there any more, rounded here."""
    start, parts = len(forward.row.tokens), []
    for part, own in enumerate((keys, values)):
        taken = round_to_8_bits(own)
        for head, there in enumerate(forward.stored[index]):
            for i in range(own.shape[1]):
                other = there.get(start + i, (None, None))[part]
                if other is None:
                    forward.guessed = True
                    continue
                assert are_nearest(other, own[head, i]), (
                    f"layer {index}, head {head}: position {start + i} is stored as another number"
                )
                taken[head, i] = other
        parts.append(taken)
    return parts[0], parts[1]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    forward, index, n = _Now.forward, module.layer_idx, query.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys, values = key[0], value[0]
    if forward.row.rounded and index in forward.stored:
        keys, values = _as_stored(forward, index, keys, values)
    bias, seen = keys.new_zeros(keys.shape[:2]), torch.ones(keys.shape[:2], dtype=torch.bool)
    if (old := forward.row.layers.get(index)) is not None:
        keys, values = torch.cat([old.keys, keys], 1), torch.cat([old.values, values], 1)
        bias, seen = torch.cat([old.bias, bias], 1), torch.cat([old.seen, seen], 1)
    forward.layers[index] = Layer(keys, values, bias, seen)
    columns = torch.tensor([*forward.row.columns, *forward.columns])
    distance = columns[-n:, None] - columns
    window = kwargs.get("sliding_window")
    causal = (distance >= 0) & (distance < (1 << 30 if window is None else window))
    products = query[0].unflatten(0, (len(keys), -1)) @ keys[:, None].mT * scaling
    hidden, biases = ~(causal & seen[:, None])[:, None].expand_as(products), bias[:, None, None].expand_as(products)
    weights = weights_of(products.flatten(0, 1), hidden.flatten(0, 1), biases.flatten(0, 1), **kwargs)
    output = weights.view_as(products) @ values[:, None]
    return output.flatten(0, 1)[None].transpose(1, 2).contiguous(), None


AttentionInterface.register("walks", _attention)
