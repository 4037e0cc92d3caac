"""Knorm: keep keys of small norm, because they draw much attention."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.core.shapes import Scores


@dataclass(frozen=True)
class Knorm(Method):
    """Keeps the entries whose keys have the smallest L2 norm (Devoto et al. 2024, arXiv:2406.11430)."""

    name = "knorm"
    paper = "arXiv:2406.11430"

    def score(self, observation: Observation) -> Scores:
        return observation.over_heads(lambda heads: -observation.keys_of(heads).float().norm(dim=-1))
