from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset.bench.analysis import intervals
from keepset.bench.analysis.intervals import Interval

SIMULATIONS = 400


def check_coverage(draw: Callable[[], tuple[list[float], Interval | None]], truth: float, least: float = 0.95) -> None:
    """The interval holds the truth as often as it says, give or take three standard errors of the simulation."""
    hits = 0
    for _ in range(SIMULATIONS):
        values, interval = draw()
        assert interval is not None and interval.low <= sum(values) / len(values) <= interval.high
        hits += interval.low <= truth <= interval.high
    slack = 3 * math.sqrt(0.95 * 0.05 / SIMULATIONS)
    assert hits / SIMULATIONS >= least - slack
    # Always true would be no interval either, where a figure can take many values.
    assert hits < SIMULATIONS


@pytest.mark.parametrize("examples", [10, 40])
def test_the_mean_of_normal_numbers_lies_in_95_of_100_intervals(examples: int) -> None:
    random = np.random.default_rng(0)

    def draw() -> tuple[list[float], Interval | None]:
        values = random.normal(3, 2, size=examples).tolist()
        return values, intervals.of_mean(values)

    check_coverage(draw, 3)


@pytest.mark.parametrize(("examples", "share"), [(12, 0.5), (12, 0.9), (50, 0.8)])
def test_a_share_lies_in_95_of_100_intervals(examples: int, share: float) -> None:
    random = np.random.default_rng(1)

    def draw() -> tuple[list[float], Interval | None]:
        values = random.binomial(1, share, size=examples).astype(float).tolist()
        return values, intervals.of_score(values)

    check_coverage(draw, share)


@pytest.mark.parametrize("examples", [15, 60])
def test_a_paired_difference_lies_in_95_of_100_intervals(examples: int) -> None:
    random = np.random.default_rng(2)

    def draw() -> tuple[list[float], Interval | None]:
        better = random.binomial(1, 0.8, size=examples)
        worse = better * random.binomial(1, 0.75, size=examples)  # finds no more than the better one
        values = (better - worse).astype(float).tolist()
        return values, intervals.of_difference(values)

    check_coverage(draw, 0.8 - 0.8 * 0.75, least=0.93)


def test_scores_in_quarters() -> None:
    random = np.random.default_rng(3)

    def draw() -> tuple[list[float], Interval | None]:
        values = (random.binomial(4, 0.6, size=20) / 4).tolist()
        return values, intervals.of_score(values)

    check_coverage(draw, 0.6)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_ends_of_a_share_are_what_the_score_test_just_does_not_refuse(counts: tuple[int, int]) -> None:
    found, examples = counts
    share = found / examples
    interval = intervals.of_score([1.0] * found + [0.0] * (examples - found))
    assert interval is not None
    assert 0 <= interval.low <= share <= interval.high <= 1 and interval.high - interval.low > 0
    for end in interval:
        if 0 < end < 1:
            assert (share - end) ** 2 == pytest.approx(intervals.Z**2 * end * (1 - end) / examples, abs=1e-12)


@given(st.lists(st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1)]), min_size=1, max_size=40))
def test_differences_of_pairs_by_their_four_outcomes(pairs: list[tuple[int, int]]) -> None:
    interval = intervals.of_difference([float(a - b) for a, b in pairs])
    assert interval is not None
    count = {outcome: pairs.count(outcome) + 0.5 for outcome in [(0, 0), (0, 1), (1, 0), (1, 1)]}
    n = sum(count.values())
    won, lost = count[1, 0] / n, count[0, 1] / n
    margin = intervals.Z * math.sqrt((won + lost - (won - lost) ** 2) / n)
    assert interval == pytest.approx((max(won - lost - margin, -1), min(won - lost + margin, 1)))
    assert interval.low <= sum(a - b for a, b in pairs) / len(pairs) <= interval.high


def test_no_spread_is_no_certainty() -> None:
    assert intervals.of_score([1.0] * 12) == pytest.approx((0.7575, 1.0), abs=1e-3)
    assert intervals.of_score([0.0]) == pytest.approx((0.0, 0.7935), abs=1e-3)
    half = intervals.of_score([0.5] * 12)
    assert half is not None and half.high - half.low > 0.4
    same = intervals.of_difference([0.0] * 12)
    assert same == pytest.approx((-0.14, 0.14), abs=0.01)
    quarter = intervals.of_difference([0.25] * 3)
    assert quarter is not None and quarter.high - quarter.low > 0.5


def test_nothing_is_said_of_nothing() -> None:
    assert intervals.of_score([]) is None and intervals.of_difference([]) is None
    assert intervals.of_mean([]) is None and intervals.of_mean([0.3]) is None


def test_two_examples_reach_from_one_to_the_other() -> None:
    assert intervals.of_mean([0.2, 0.7]) == pytest.approx((0.2, 0.7))


def test_many_examples_give_the_interval_of_normal_theory() -> None:
    values = np.random.default_rng(4).normal(size=400)
    margin = 1.966 * values.std(ddof=1) / math.sqrt(400)
    assert intervals.of_mean(values.tolist()) == pytest.approx(
        (values.mean() - margin, values.mean() + margin), abs=0.1 * margin
    )


def test_the_same_values_give_the_same_interval() -> None:
    values = [0.1, 0.4, 0.4, 0.9]
    assert intervals.of_mean(values) == intervals.of_mean(values)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (100, 1.984)])
def test_students_t(freedom: int, quantile: float) -> None:
    assert intervals._t(freedom) == pytest.approx(quantile, abs=1e-3)


def test_columns_of_an_example_are_drawn_together() -> None:
    values = np.random.default_rng(5).random((7, 1))
    drawn = intervals.resampled(np.hstack([values, 1 - 2 * values, np.ones_like(values)]))
    np.testing.assert_allclose(drawn[:, 1], 1 - 2 * drawn[:, 0])
    np.testing.assert_allclose(drawn[:, 2], 1)
    # With the spread of a mean of seven draws, and other draws for another seed.
    assert drawn[:, 0].std() == pytest.approx(values.std() / math.sqrt(7), rel=0.1)
    other = intervals.resampled(values, seed=1)[:, 0]
    assert abs(np.corrcoef(drawn[:, 0], other)[0, 1]) < 0.1


def test_the_average_of_independent_figures() -> None:
    part = (0.5, Interval(0.4, 0.7))
    assert intervals.of_average([part]) == pytest.approx(part[1])
    assert intervals.of_average([part] * 4) == pytest.approx((0.45, 0.6))
    # By hand: below 0.3, 0.4 make 0.5 of two; above 0 and 0.1.
    assert intervals.of_average([(1.0, Interval(0.7, 1.0)), (0.5, Interval(0.1, 0.6))]) == pytest.approx((0.5, 0.8))


def test_the_average_over_tasks_lies_in_95_of_100_intervals() -> None:
    random = np.random.default_rng(6)
    shares = [0.95, 0.6, 0.3]

    def draw() -> tuple[list[float], Interval | None]:
        parts, means = [], []
        for share in shares:
            values = random.binomial(1, share, size=20).astype(float).tolist()
            interval = intervals.of_score(values)
            assert interval is not None
            parts.append((sum(values) / len(values), interval))
            means.append(parts[-1][0])
        return means, intervals.of_average(parts)

    check_coverage(draw, sum(shares) / 3)
