"""Controls that look at no entry: StreamingLLM keeps by position, Random by chance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.core.traits import Traits

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class StreamingLLM(Method):
    """Keeps the first tokens and the newest ones (Xiao et al. 2024, arXiv:2309.17453, section 3.2).

    There are four sinks, the paper's default; change them with the recipe's `sinks=`. Positions are not renumbered:
    entries keep the rotation with which they were cached.
    """

    name = "streaming_llm"
    paper = "arXiv:2309.17453"
    traits = Traits(sinks=4)

    def score(self, observation: Observation) -> Scores:
        return observation.positions.float()


@dataclass(frozen=True)
class Random(Method):
    """Keeps entries by chance; no paper.

    An entry's number is a hash of (seed, layer, KV head, position), so it is the same in every run, on any device,
    under any runtime and in any row of a batch.
    """

    name = "random"

    seed: int = parameter(0, minimum=0, maximum=2**31 - 1)

    def score(self, observation: Observation) -> Scores:
        heads = torch.arange(observation.valid.shape[1], device=observation.valid.device)
        streams = stream(self.seed, observation.indices[:, None], heads)[..., None]
        return _hash(streams ^ observation.positions.long()).float() / 2**32


def stream(seed: int, layers: Int[Tensor, "..."] | int, rows: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Return a number for each row (a head or a sample, below 4096) of each layer.

    Args:
        seed: of the recipe.
        layers: indices of layers in the model.
        rows: a head or a sample of each.
    """
    return _hash(_hash(torch.full_like(rows, seed)) ^ (layers * 4096 + rows))


def normal(streams: Int[Tensor, "*rows"], count: int) -> Float[Tensor, "*rows count"]:
    """Return the first `count` standard normal numbers of each stream in float32 (Box and Muller 1958).

    Args:
        streams: what `stream` has returned.
        count: how many numbers of each.
    """
    counters = torch.arange(2 * count, device=streams.device)
    uniform = (_hash(streams[..., None] ^ counters).double() + 0.5) / 2**32
    radius, angle = uniform.unflatten(-1, (count, 2)).unbind(-1)
    return ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).float()


def _hash(x: Tensor) -> Tensor:
    """Return numbers mixed to 32 bits, uniform in [0, 2**32) (xor, shift, multiply), in int64 arithmetic."""
    x = (((x >> 16) ^ x) * 0x45D9F3B) & _MASK
    x = (((x >> 16) ^ x) * 0x45D9F3B) & _MASK
    return (x >> 16) ^ x
