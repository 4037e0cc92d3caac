"""Random: the control that every comparison needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.method import Method, parameter
from keepset.observation import Observation

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Random(Method):
    """Keeps entries by chance; no paper.

    An entry's number is a hash of (seed, layer, KV head, position), so that a run repeats on any device,
    under any runtime and in any place of a batch.
    """

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "none"

    seed: int = parameter(0, minimum=0, maximum=2**31 - 1)

    def score(self, observation: Observation) -> Float[Tensor, "batch kv_heads entries"]:
        """Uniform in [0, 1)."""
        heads = torch.arange(observation.keys.shape[1], device=observation.keys.device)
        stream = _hash(_hash(torch.full_like(heads, self.seed)) ^ (observation.layer * 4096 + heads))
        return _hash(stream[:, None] ^ observation.positions.long()).float() / 2**32


def _hash(x: Tensor) -> Tensor:
    """A 32-bit integer mixer (xor, shift, multiply) in int64 arithmetic."""
    x = (((x >> 16) ^ x) * 0x45D9F3B) & _MASK
    x = (((x >> 16) ^ x) * 0x45D9F3B) & _MASK
    return (x >> 16) ^ x
