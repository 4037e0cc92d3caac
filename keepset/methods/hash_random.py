"""Numbers by chance that follow from what they are for, so that a run repeats on any device and in any batch."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

_MASK = 0xFFFFFFFF


def stream(seed: int, layers: Int[Tensor, "..."] | int, rows: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """A number for each row (head, sample) of each layer, as far as they are broadcast; rows up to 4096."""
    return _hash(_hash(torch.full_like(rows, seed)) ^ (layers * 4096 + rows))


def draw(streams: Int[Tensor, "*rows"], at: Int[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """Whole numbers, uniform in [0, 2**32), one for each place in its stream."""
    return _hash(streams ^ at)


def normal(streams: Int[Tensor, "*rows"], count: int) -> Float[Tensor, "*rows count"]:
    """The first `count` standard normal numbers of each stream (Box and Muller 1958), float32."""
    places = torch.arange(2 * count, device=streams.device).expand(*streams.shape, -1)
    uniform = (draw(streams[..., None].expand_as(places), places).double() + 0.5) / 2**32
    radius, angle = uniform.unflatten(-1, (count, 2)).unbind(-1)
    return ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).float()


def _hash(x: Tensor) -> Tensor:
    """A 32-bit integer mixer (xor, shift, multiply) in int64 arithmetic."""
    x = (((x >> 16) ^ x) * 0x45D9F3B) & _MASK
    x = (((x >> 16) ^ x) * 0x45D9F3B) & _MASK
    return (x >> 16) ^ x
