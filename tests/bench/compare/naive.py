"""Distances of predictions over plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def divergence(step: Sequence[float], other: Sequence[float]) -> float:
    """KL in nats of two rows of log-probabilities."""
    return sum(math.exp(p) * (p - q) for p, q in zip(step, other, strict=True))


def best(step: Sequence[float]) -> int:
    return max(range(len(step)), key=step.__getitem__)
