"""Diagnostics of random events against sets of positions, and repetition against a loop over n-grams."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import KeepSet
from keepset.bench.analysis.diagnostics import (
    Snapshot,
    by_depth,
    gone,
    longest_run,
    middle_retention,
    proxy_segments,
    repetition_rate,
    wipeout_rate,
)
from keepset.core.keep_set import LayerKeepSet
from tests.tiers import examples

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

    def each(self, naive: Callable[[set[int], int], float]) -> list[list[list[float]]]:
        """What a function of a set and a text's length says of every layer, request and head."""
        return [[[naive(s, n) for s in heads] for heads, n in zip(b, self.lengths, strict=True)] for b in self.sets]


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


@examples(60, derandomize=False)
@given(events=histories(), region=st.sampled_from([1, 2, 5, 16, 100]))
def test_every_event_against_sets(events: list[Event], region: int) -> None:
    def wiped(kept: set[int], length: int) -> float:
        regions = [set(range(at, min(at + region, length))) for at in range(0, length, region)]
        return sum(not part & kept for part in regions) / len(regions)

    def middle(kept: set[int], length: int) -> float:
        third = [t for t in range(length) if length // 3 <= t < length - length // 3]
        return sum(t in kept for t in third) / len(third)

    def runs(kept: set[int], length: int) -> int:
        return sum(t - 1 not in kept for t in kept)

    def run_length(kept: set[int], length: int) -> float:
        return len(kept) / max(1, runs(kept, length))

    for event in events:
        snapshot = event.snapshot
        numbers, lengths = proxy_segments(snapshot)
        same(numbers, event.each(runs))
        same(lengths, event.each(run_length))
        same(wipeout_rate(snapshot, region), event.each(wiped))
        same(middle_retention(snapshot), event.each(middle))
        dropped = [
            [
                [[t < n and t not in s for t in range(max(event.lengths))] for s in heads]
                for heads, n in zip(b, event.lengths, strict=True)
            ]
            for b in event.sets
        ]
        assert torch.equal(gone(snapshot), torch.tensor(dropped))


def same(measured: torch.Tensor, expected: list[list[list[float]]]) -> None:
    torch.testing.assert_close(measured.double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


def test_by_hand() -> None:
    event = Event([[[{0, 1, 33}, {15, 16, 32}, set()]]], [34])
    assert wipeout_rate(event.snapshot)[0, 0].tolist() == pytest.approx([1 / 3, 0, 1])
    event = Event([[[{0, 1, 2, 7, 8, 9}, {3, 4, 5, 6}, {3, 9}]]], [10])
    assert middle_retention(event.snapshot)[0, 0].tolist() == [0, 1, 0.25]


@examples(60, derandomize=False)
@given(rows=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4))
def test_longest_run(rows: list[list[bool]]) -> None:
    def naive(row: list[bool]) -> int:
        return max(len(run) for run in "".join("x" if flag else " " for flag in row).split(" "))

    assert longest_run(torch.tensor(rows)).tolist() == [naive(row) for row in rows]
    assert longest_run(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("layers", "early", "late"), [(1, 0, 0), (2, 1, 1), (3, 1, 1), (4, 1, 1), (5, 1, 1), (28, 8, 8), (30, 9, 9)]
)
def test_depth(layers: int, early: int, late: int) -> None:
    values = torch.rand(layers, 2, 3, generator=torch.Generator().manual_seed(layers))
    numbers = values.flatten(1).double().mean(-1).tolist()
    parts = {"early": numbers[:early], "middle": numbers[early : layers - late], "late": numbers[layers - late :]}
    expected = {name: math.fsum(part) / len(part) for name, part in parts.items() if part}
    assert by_depth(values) == pytest.approx(expected, rel=1e-5)


@examples(60, derandomize=False)
@given(ids=st.lists(st.integers(0, 3), max_size=30), n=st.integers(1, 5))
def test_repetition_is_the_share_of_ngrams_that_occurred_before(ids: list[int], n: int) -> None:
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    again = sum(gram in grams[:i] for i, gram in enumerate(grams))
    expected = again / len(grams) if grams else 0.0
    assert repetition_rate(torch.tensor(ids, dtype=torch.long), n) == pytest.approx(expected)
    if n == 4:
        assert repetition_rate(torch.tensor(ids, dtype=torch.long)) == pytest.approx(expected)
