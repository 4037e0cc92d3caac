"""Diagnostics of random events against sets of positions, and repetition against a loop over n-grams."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset.lab.analysis.events import (
    by_depth,
    longest_run,
    middle_retention,
    proxy_segments,
    repetition_rate,
    wipeout_rate,
)
from tests.tiers import examples

Sets = list[list[set[int]]]  # [layer][head] -> kept positions


def kept(sets: Sets, length: int) -> torch.Tensor:
    return torch.tensor([[[t in s for t in range(length)] for s in heads] for heads in sets])


def each(sets: Sets, naive: Callable[[set[int], int], float], length: int) -> list[list[float]]:
    """What a function of a set and a text's length says of every layer and head."""
    return [[naive(s, length) for s in heads] for heads in sets]


@st.composite
def events(draw: st.DrawFn) -> tuple[Sets, int]:
    """What each head has kept of a text, and the text's length."""
    layers, heads = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 8]))
    chance = random.Random(draw(st.integers(0, 10**6)))
    length, share = draw(st.sampled_from([1, 2, 3, 7, 16, 17, 33, 54])), chance.choice([0.0, 0.1, 0.5, 1.0])
    return [
        [{t for t in range(length) if chance.random() < share} for _ in range(heads)] for _ in range(layers)
    ], length


@examples(200, derandomize=False)
@given(event=events(), region=st.sampled_from([1, 2, 5, 16, 100]))
def test_every_event_against_sets(event: tuple[Sets, int], region: int) -> None:
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

    mask = kept(*event)
    numbers, lengths = proxy_segments(mask)
    for measured, naive in (
        (numbers, runs),
        (lengths, run_length),
        (wipeout_rate(mask, region), wiped),
        (middle_retention(mask), middle),
    ):
        same(measured, each(event[0], naive, event[1]))


def same(measured: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(measured.double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


def test_by_hand() -> None:
    assert wipeout_rate(kept([[{0, 1, 33}, {15, 16, 32}, set()]], 34))[0].tolist() == pytest.approx([1 / 3, 0, 1])
    assert middle_retention(kept([[{0, 1, 2, 7, 8, 9}, {3, 4, 5, 6}, {3, 9}]], 10))[0].tolist() == [0, 1, 0.25]


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
