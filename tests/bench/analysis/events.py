"""Random events of a cache, as sets of positions and as snapshots."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from keepset import KeepSet
from keepset.bench.analysis.diagnostics import Snapshot
from keepset.core.keep_set import LayerKeepSet

Sets = list[list[list[set[int]]]]  # [layer][request][head] -> kept positions


@dataclass(frozen=True)
class Event:
    """What stayed, and how long each request was."""

    sets: Sets
    lengths: list[int]

    @property
    def snapshot(self) -> Snapshot:
        size = max(self.lengths)
        mask = torch.tensor([[[[t in s for t in range(size)] for s in heads] for heads in b] for b in self.sets])
        positions = torch.arange(size).expand(mask.shape[1:])
        parts = [LayerKeepSet.from_mask(5 * i, part, positions, 8).to_record() for i, part in enumerate(mask)]
        return Snapshot(KeepSet(parts), torch.tensor(self.lengths))

    def each(self, measure: object) -> torch.Tensor:
        """What a measure of a set and a text's length says, for every layer, request and head."""
        return torch.tensor(
            [[[measure(s, n) for s in heads] for heads, n in zip(b, self.lengths, strict=True)] for b in self.sets],
            dtype=torch.float64,
        )


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Two to four events of one cache: each keeps some of what is left and of what is new."""
    layers, batch, heads = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8]))
    chance = random.Random(draw(st.integers(0, 10**6)))
    lengths = [draw(st.sampled_from([1, 2, 3, 7, 16, 17, 33])) for _ in range(batch)]
    held: Sets = [[[set(range(n)) for _ in range(heads)] for n in lengths] for _ in range(layers)]
    events = []
    for _ in range(draw(st.integers(2, 4))):
        share = chance.choice([0.0, 0.1, 0.5, 1.0])
        held = [[[{t for t in s if chance.random() < share} for s in b] for b in layer] for layer in held]
        events.append(Event(held, lengths))
        new = [chance.choice([0, 1, 5, 16]) for _ in lengths]
        held = [
            [[s | set(range(n, n + k)) for s in b] for b, n, k in zip(layer, lengths, new, strict=True)]
            for layer in held
        ]
        lengths = [n + k for n, k in zip(lengths, new, strict=True)]
    return events


def same(measured: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(measured.double(), expected, rtol=1e-6, atol=1e-6)
