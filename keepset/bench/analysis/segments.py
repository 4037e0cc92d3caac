"""Segments: the regions that a method divided its budget among, where it tells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from keepset.allocators.ams import Segments
from keepset.core.budget import Budget
from keepset.core.method import Method
from keepset.core.observation import Observation


@runtime_checkable
class Segmented(Protocol):
    """A method that can tell its segments at an event, as `ams` does."""

    def segments(self, observation: Observation, budget: Budget) -> Segments:
        """Mass and segment of every entry, and how many entries each segment was to keep."""
        ...


@dataclass(frozen=True, eq=False)
class HeadSegments:
    """One head's mass and segments at an event: what Figure 3 of Yang and Shen (AMS) draws.

    Attributes:
        mass: of every entry, in the order of the cache.
        ends: one past each segment's last entry.
        quotas: how many entries each segment was to keep.
    """

    mass: Float[Tensor, " entries"]
    ends: Int[Tensor, " segments"]
    quotas: Int[Tensor, " segments"]


def head_segments(method: Method, observation: Observation, budget: Budget) -> list[HeadSegments] | None:
    """The first request's segments, head by head; None where the method has none to tell.

    Only the outermost method is asked: one inside another divides what that one leaves it, which it cannot know.
    Segments without entries are left out.
    """
    if not isinstance(method, Segmented):
        return None
    told = method.segments(observation, budget)
    heads = []
    for head, valid in enumerate(observation.valid[0]):
        quotas = told.quotas[0, head]
        sizes = told.segment[0, head][valid].long().bincount(minlength=quotas.shape[0])
        real = sizes > 0
        heads.append(HeadSegments(told.mass[0, head][valid].float(), sizes.cumsum(0)[real], quotas[real]))
    return heads
