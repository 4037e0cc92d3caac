"""Heads of any lengths, packed one after another in flat tensors: how the host and the kernels know where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


@dataclass
class Run:
    """Neighbouring heads with equally many entries: `heads * capacity` places from `start` on."""

    first: int
    heads: int
    start: int
    count: int
    capacity: int

    def view(self, flat: Shaped[Tensor, " places *rest"]) -> Shaped[Tensor, "heads entries *rest"]:
        """This run's part of a flat tensor, without a copy."""
        stop = self.start + self.heads * self.capacity
        return flat[self.start : stop].unflatten(0, (self.heads, self.capacity))[:, : self.count]


def runs_of(counts: Sequence[int]) -> list[Run]:
    """Exactly the places that heads with these counts need; equal neighbours share a run."""
    runs: list[Run] = []
    start = 0
    for head, count in enumerate(counts):
        if runs and runs[-1].count == count:
            runs[-1].heads += 1
        else:
            runs.append(Run(head, 1, start, count, count))
        start += count
    return runs


class HeadTable:
    """The same for kernels: on the device, and written only when heads move.

    All heads grow by the same tokens, so how much they have grown since is one number that the host knows.

    Attributes:
        grown: entries that every head has beyond `counts`.
    """

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        self._starts = [run.start + i * run.capacity for run in runs for i in range(run.heads)]
        self._counts = [run.count for run in runs for _ in range(run.heads)]
        self._device, self.grown = device, 0

    @cached_property
    def _both(self) -> Int[Tensor, "2 heads"]:
        return torch.tensor([self._starts, self._counts]).to(self._device, non_blocking=True)

    @property
    def starts(self) -> Int[Tensor, " heads"]:
        """The place of each head's first entry."""
        return self._both[0]

    @property
    def counts(self) -> Int[Tensor, " heads"]:
        """Entries of each head when the table was made."""
        return self._both[1]


@dataclass(frozen=True, eq=False)
class PackedHeads:
    """What attention looks at.

    Attributes:
        keys, values, positions: flat, of all heads; positions count from each request's first token.
        runs: where the heads lie, in order: `request * kv_heads + head`.
        table: the same on the device, made when a kernel asks for it.
        bias: added to the logits of an entry.
    """

    keys: Float[Tensor, "places head_dim"]
    values: Float[Tensor, "places value_dim"]
    positions: Int[Tensor, " places"]
    runs: Sequence[Run]
    table: HeadTable
    bias: Float[Tensor, " places"] | None = None

    @property
    def longest(self) -> int:
        """Entries of the longest head."""
        return max(run.count for run in self.runs)

    @property
    def entries(self) -> int:
        """Of all heads."""
        return sum(run.heads * run.count for run in self.runs)
