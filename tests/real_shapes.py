"""Numbers as real models have them, where random ones have none: sinks, massive residuals, dead and equal channels.

Measured on SmolLM2 135M: the residual of position 0 is 25,000 in one channel; a layer ranks that position's key 859th
of 1,024 by its length, others first; a second sink stands in the middle of a text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from keepset import Observation
from tests.observations import changed

MASSIVE = 25_000.0
SINKS = range(10, 18)
"""Tokens of a shaped model that are sinks wherever they are."""


def _sink(keys: Tensor, values: Tensor, queries: Tensor, at: int) -> None:
    """An entry that takes nearly all attention, and has hardly a value."""
    towards = queries.nan_to_num().mean(-2).unflatten(1, (keys.shape[1], -1)).mean(2)
    keys[:, :, at] = 200 * towards / towards.norm(dim=-1, keepdim=True).clamp(min=1e-3)
    values[:, :, at] *= 1e-3


def _sinks(keys: Tensor, values: Tensor, queries: Tensor) -> None:
    _sink(keys, values, queries, 0)


def _second_sink(keys: Tensor, values: Tensor, queries: Tensor) -> None:
    _sink(keys, values, queries, 0)
    _sink(keys, values, queries, keys.shape[2] * 2 // 3)


def _massive(keys: Tensor, values: Tensor, queries: Tensor) -> None:
    keys[:, :, 0, 0], values[:, :, 0, -1] = MASSIVE, -MASSIVE


def _dead(keys: Tensor, values: Tensor, queries: Tensor) -> None:
    keys[..., 1:3] = 0
    values[..., 0] = 0


def _equal(keys: Tensor, values: Tensor, queries: Tensor) -> None:
    keys[..., 0], keys[..., -1] = 30.0, -30.0
    values[..., 1] = values[..., 0]


def _huge(keys: Tensor, values: Tensor, queries: Tensor) -> None:
    keys *= 15_000  # each number fits float16, and a row's length does not
    values *= 15_000


def _first(keys: Tensor, values: Tensor, queries: Tensor) -> None:
    keys[:, :, 0] *= 1e-4


def _last(keys: Tensor, values: Tensor, queries: Tensor) -> None:
    keys[:, :, 0] *= 40


SHAPES: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "sink": _sinks,
    "second sink": _second_sink,
    "massive": _massive,
    "dead channels": _dead,
    "equal channels": _equal,
    "huge": _huge,
    "shortest first": _first,
    "longest first": _last,
}
"""Changes of keys, values and queries, `[batch, heads, n, dim]`, in place."""


def shaped(observation: Observation, name: str) -> Observation:
    """The same observation with entries of this shape; holes stay holes."""
    assert observation.queries is not None
    keys, values = observation.keys.clone(), observation.values.clone()
    SHAPES[name](keys, values, observation.queries)
    return changed(
        observation,
        keys=keys.where(observation.keys.isfinite(), observation.keys),
        values=values.where(observation.values.isfinite(), observation.values),
    )


def shape_model(model: Any) -> Any:
    """A tiny Llama's weights with these shapes, and the model.

    Some tokens have a massive residual, which each layer's norm reduces to one channel. Their keys point where all
    queries look, are the shortest of all in the first layer and the longest in the others, and their values are small.
    """
    decoder = model.model
    decoder.embed_tokens.weight.data[:, 0] = 0
    decoder.embed_tokens.weight.data[:, 1] = 1  # the part that all queries share
    decoder.embed_tokens.weight.data[SINKS.start : SINKS.stop, 0] = MASSIVE
    for index, layer in enumerate(decoder.layers):
        attention, dim = layer.self_attn, layer.self_attn.head_dim
        keys, values, queries = (getattr(attention, name).weight.data for name in ("k_proj", "v_proj", "q_proj"))
        half = dim // 2
        for head in range(len(keys) // dim):  # the slowest pair of a rotation says hardly where a token is
            keys[head * dim : (head + 1) * dim, 0] = 0
            keys[head * dim + half - 1, 0] = (0.02, 3.0)[index > 0]
        for head in range(len(queries) // dim):
            queries[head * dim + half - 1, 1] = 3.0
        keys[[1, half + 1]] = 0  # dead: a pair of the first head
        values[:, 0] *= 1e-2
        values[3] = values[2]  # equal
    return model
