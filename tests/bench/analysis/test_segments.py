from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from keepset import Budget, Observation
from keepset.bench.analysis.trace import head_segments
from keepset.methods.tova import TOVA
from tests.methods.naive import Given


class Telling(Given):
    """Says what the test writes into it."""

    told: SimpleNamespace

    def segments(self, observation: Observation, budget: Budget) -> SimpleNamespace:
        return self.told


def test_heads_are_told_without_holes_and_empty_segments() -> None:
    keys = torch.zeros(2, 2, 5, 3)
    valid = torch.tensor([[[True] * 5, [True] * 3 + [False] * 2]]).expand(2, -1, -1)
    mass = torch.rand(2, 2, 5, dtype=torch.bfloat16)
    segment = torch.tensor([[[0, 0, 1, 1, 2], [0, 2, 2, 3, 3]]]).expand(2, -1, -1)
    quotas = torch.tensor([[[2, 1, 1, 0], [1, 0, 2, 5]]]).expand(2, -1, -1)
    Telling.told = SimpleNamespace(mass=mass, segment=segment, quotas=quotas)
    told = head_segments(Telling(), Observation(keys=keys, values=keys, valid=valid), Budget(3))
    assert told is not None
    assert [head.ends.tolist() for head in told] == [[2, 4, 5], [1, 3]]
    assert [head.quotas.tolist() for head in told] == [[2, 1, 1], [1, 2]]
    masses: list[Tensor] = [head.mass for head in told]
    assert torch.equal(masses[0], mass[0, 0].float()) and torch.equal(masses[1], mass[0, 1, :3].float())


def test_a_method_without_segments_tells_none() -> None:
    keys = torch.zeros(1, 1, 4, 3)
    assert head_segments(TOVA(), Observation(keys=keys, values=keys), Budget(3)) is None
