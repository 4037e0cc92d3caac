"""Random: keep entries by chance, the control that every comparison needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.methods.hash_random import draw, stream


@dataclass(frozen=True)
class Random(Method):
    """Keeps entries by chance; no paper.

    An entry's number is a hash of (seed, layer, KV head, position), so that a run repeats on any device, under any
    runtime and in any place of a batch.
    """

    name = "random"

    seed: int = parameter(0, minimum=0, maximum=2**31 - 1)

    def score(self, observation: Observation) -> Scores:
        heads = torch.arange(observation.valid.shape[1], device=observation.valid.device)
        streams = stream(self.seed, observation.indices[:, None], heads)[..., None]
        positions = observation.positions.long()
        return draw(streams.expand_as(positions), positions).float() / 2**32
