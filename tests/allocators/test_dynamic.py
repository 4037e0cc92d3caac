from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget
from keepset.allocators.dynamic import Dynamic
from tests.allocators.formulas import Scores, given_scores, rounded
from tests.allocators.test_layers import level
from tests.methods.naive import Given
from tests.tiers import examples


def naive(scores: Scores, keep: int, r_max: int, interval: int) -> list[int]:
    """Update after update: count who has the best scores so far, divide everything among them, cut."""
    layers, heads, length = len(scores), len(scores[0]), len(scores[0][0])
    rest, room = (keep - 1) * layers, length - 1
    held = [min(r_max * (keep - 1), room)] * layers
    for layer in range(layers):
        if (layer + 1) % interval and layer + 1 < layers:
            continue
        pool = [
            (scores[one][head][entry], entry, one, head)
            for one in range(layer + 1)
            for head in range(heads)
            for entry in range(length)
        ]
        best = sorted(pool, reverse=True)[: (keep - 1) * heads * (layer + 1)]
        shares = [sum(one == which for _, _, which, _ in best) for one in range(layer + 1)]
        if sum(min(most, share * 10**9) for most, share in zip(held, shares, strict=False)) < min(
            rest, sum(held[: layer + 1])
        ):
            shares = [share * 10**9 + sum(shares) for share in shares]  # never quite zero
        ideal = level(shares, rest, held[: layer + 1])
        held[: layer + 1] = rounded(ideal, min(rest, sum(held[: layer + 1])))
    return [1 + count for count in held]


@examples(60)
@given(data=st.data(), keep=st.integers(1, 12), r_max=st.sampled_from([1, 2, 10]), interval=st.integers(1, 4))
def test_matches_the_updates_written_out(data: st.DataObject, keep: int, r_max: int, interval: int) -> None:
    layers, heads, length = (data.draw(st.integers(1, most)) for most in (5, 3, 12))
    keep = min(keep, length)
    # All scores differ, so that it is not ties that decide; their order is random.
    numbers = data.draw(st.permutations(range(layers * heads * length)))
    table = torch.tensor(numbers).float().view(layers, heads, length)
    table += (
        100.0 * torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=layers, max_size=layers)))[:, None, None]
    )
    table = table.flatten().argsort().argsort().view(table.shape).float()
    scores = table.tolist()
    keep_set = Dynamic(Given(), r_max=r_max, interval=interval).select_all(given_scores(*scores), Budget(keep))
    counts = keep_set.counts[:, 0].tolist()
    assert all(len(set(layer)) == 1 for layer in counts)
    got = [layer[0] for layer in counts]
    assert sum(got) == keep * layers
    expected = naive(scores, keep, r_max, interval)
    # Who is a hair next to a half may be rounded to either side.
    assert all(abs(mine - theirs) <= 1 for mine, theirs in zip(got, expected, strict=True))


def test_by_hand() -> None:
    low, mid, high = ([[float(base + entry) for entry in range(30)]] for base in (0, 100, 125))
    counts = Dynamic(Given(), interval=3).select_all(given_scores(mid, high, low), Budget(11)).counts.flatten()
    # The 30 best of the pool: 130 to 154 in the second layer alone, 128 and 129 in two, 127 where it comes earlier.
    assert counts.tolist() == [1 + 2, 1 + 28, 1]


def test_a_layer_holds_at_most_r_max_times_the_mean() -> None:
    low, high = ([[float(base + entry) for entry in range(100)]] for base in (0, 1000))
    for r_max, expected in ((1, [11, 11, 11]), (2, [6, 21, 6]), (10, [1, 31, 1])):
        counts = Dynamic(Given(), r_max=r_max).select_all(given_scores(low, high, low), Budget(11)).counts.flatten()
        assert counts.tolist() == expected


def test_what_an_update_cut_does_not_come_back() -> None:
    """The second layer has the 10 best scores: among two layers that is all that counts, among four it is not."""
    low, mid = ([[float(base + entry) for entry in range(40)]] for base in (0, 100))
    few = [[1000.0 + entry if entry < 10 else -entry for entry in range(40)]]
    layers = given_scores(mid, few, low, low)
    assert Dynamic(Given(), interval=4).select_all(layers, Budget(5)).counts.flatten().tolist() == [7, 11, 1, 1]
    assert Dynamic(Given(), interval=2).select_all(layers, Budget(5)).counts.flatten().tolist() == [1, 17, 1, 1]


@pytest.mark.parametrize("score", [0.0, math.nan, math.inf])
def test_equal_scores_are_equal_budgets(score: float) -> None:
    scores = [[[score] * 10 for _ in range(2)] for _ in range(3)]
    assert (
        Dynamic(Given(), interval=1).select_all(given_scores(*scores), Budget(4)).counts.flatten().tolist() == [4] * 6
    )
