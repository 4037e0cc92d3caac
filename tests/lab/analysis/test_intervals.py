"""Intervals of 95 %: how often they hold the truth, and closed forms."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset.lab.analysis import intervals
from keepset.lab.analysis.intervals import Figure, of_average, of_difference, of_mean, of_score

SIMULATIONS = 400
Draw = Callable[[Any], Figure | None]


def ends(figure: Figure | None) -> tuple[float, float]:
    """The ends of an interval, between which its figure lies."""
    assert figure is not None and figure.low is not None and figure.high is not None
    assert figure.low - 1e-12 <= figure.value <= figure.high + 1e-12
    return figure.low, figure.high


def drawn(figure: Callable[[list[float]], Figure | None], values: Callable[[Any], Any]) -> Draw:
    return lambda random: figure(np.asarray(values(random), float).tolist())


def pairs(examples: int) -> Draw:
    """The worse recipe finds no more than the better one."""

    def values(random: Any) -> Any:
        better = random.binomial(1, 0.8, size=examples)
        return better - better * random.binomial(1, 0.75, size=examples)

    return drawn(of_difference, values)


def three_tasks(random: Any) -> Figure:
    scores = [of_score(random.binomial(1, share, size=20).astype(float).tolist()) for share in (0.95, 0.6, 0.3)]
    return of_average([score for score in scores if score is not None])


@pytest.mark.parametrize(
    ("draw", "seed", "truth", "least"),
    [
        pytest.param(drawn(of_mean, lambda random: random.normal(3, 2, size=10)), 0, 3, 0.95, id="10 numbers"),
        pytest.param(drawn(of_mean, lambda random: random.normal(3, 2, size=40)), 0, 3, 0.95, id="40 numbers"),
        pytest.param(drawn(of_score, lambda random: random.binomial(1, 0.5, size=12)), 1, 0.5, 0.95, id="half of 12"),
        pytest.param(drawn(of_score, lambda random: random.binomial(1, 0.9, size=12)), 1, 0.9, 0.95, id="most of 12"),
        pytest.param(drawn(of_score, lambda random: random.binomial(1, 0.8, size=50)), 1, 0.8, 0.95, id="most of 50"),
        pytest.param(drawn(of_score, lambda random: random.binomial(4, 0.6, size=20) / 4), 3, 0.6, 0.95, id="quarters"),
        pytest.param(pairs(15), 2, 0.8 - 0.8 * 0.75, 0.93, id="15 pairs"),
        pytest.param(pairs(60), 2, 0.8 - 0.8 * 0.75, 0.93, id="60 pairs"),
        pytest.param(three_tasks, 6, (0.95 + 0.6 + 0.3) / 3, 0.95, id="average of tasks"),
    ],
)
def test_the_truth_lies_in_95_of_100_intervals(draw: Draw, seed: int, truth: float, least: float) -> None:
    """Give or take three standard errors of the simulation."""
    random, hits = np.random.default_rng(seed), 0
    for _ in range(SIMULATIONS):
        low, high = ends(draw(random))
        hits += low <= truth <= high
    slack = 3 * math.sqrt(0.95 * 0.05 / SIMULATIONS)
    # Always true would be no interval either, where a figure can take many values.
    assert least - slack <= hits / SIMULATIONS < 1


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_ends_of_a_share_are_what_the_score_test_just_does_not_refuse(counts: tuple[int, int]) -> None:
    found, examples = counts
    share = found / examples
    figure = of_score([1.0] * found + [0.0] * (examples - found))
    low, high = ends(figure)
    assert figure is not None and figure.value == share and 0 <= low < high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert (share - end) ** 2 == pytest.approx(intervals.Z**2 * end * (1 - end) / examples, abs=1e-12)


@given(st.lists(st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1)]), min_size=1, max_size=40))
def test_differences_of_pairs_by_their_four_outcomes(pairs: list[tuple[int, int]]) -> None:
    figure = of_difference([float(a - b) for a, b in pairs])
    count = {outcome: pairs.count(outcome) + 0.5 for outcome in [(0, 0), (0, 1), (1, 0), (1, 1)]}
    n = sum(count.values())
    won, lost = count[1, 0] / n, count[0, 1] / n
    margin = intervals.Z * math.sqrt((won + lost - (won - lost) ** 2) / n)
    assert ends(figure) == pytest.approx((max(won - lost - margin, -1), min(won - lost + margin, 1)))
    assert figure is not None and figure.value == pytest.approx(sum(a - b for a, b in pairs) / len(pairs))


def test_no_spread_is_no_certainty_and_nothing_says_nothing() -> None:
    assert ends(of_mean([0.2, 0.7])) == pytest.approx((0.2, 0.7))
    values = np.random.default_rng(4).normal(size=400)
    mean, margin = values.mean(), 1.966 * values.std(ddof=1) / math.sqrt(400)
    assert ends(of_mean(values.tolist())) == pytest.approx((mean - margin, mean + margin), abs=0.1 * margin)
    assert of_mean(values.tolist()) == of_mean(values.tolist())
    assert ends(of_score([1.0] * 12)) == pytest.approx((0.7575, 1.0), abs=1e-3)
    assert ends(of_score([0.0])) == pytest.approx((0.0, 0.7935), abs=1e-3)
    assert ends(of_difference([0.0] * 12)) == pytest.approx((-0.14, 0.14), abs=0.01)
    for figure, least in ((of_score([0.5] * 12), 0.4), (of_difference([0.25] * 3), 0.5)):
        low, high = ends(figure)
        assert high - low > least
    assert of_score([]) is of_difference([]) is of_mean([]) is None and of_mean([0.3]) == Figure(0.3)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (100, 1.984)])
def test_students_t(freedom: int, quantile: float) -> None:
    assert intervals._t(freedom) == pytest.approx(quantile, abs=1e-3)


def test_columns_of_an_example_are_drawn_together_and_tasks_are_independent() -> None:
    values = np.random.default_rng(5).random((7, 1))
    drawn = intervals.resampled(np.hstack([values, 1 - 2 * values, np.ones_like(values)]))
    np.testing.assert_allclose(drawn[:, 1], 1 - 2 * drawn[:, 0])
    np.testing.assert_allclose(drawn[:, 2], 1)
    # With the spread of a mean of seven draws, and other draws for another seed.
    assert drawn[:, 0].std() == pytest.approx(values.std() / math.sqrt(7), rel=0.1)
    other = intervals.resampled(values, seed=1)[:, 0]
    assert abs(np.corrcoef(drawn[:, 0], other)[0, 1]) < 0.1
    part = Figure(0.5, 0.4, 0.7)
    assert ends(of_average([part])) == pytest.approx((0.4, 0.7))
    assert ends(of_average([part] * 4)) == pytest.approx((0.45, 0.6))
    # By hand: below 0.3, 0.4 make 0.5 of two; above 0 and 0.1.
    assert ends(of_average([Figure(1.0, 0.7, 1.0), Figure(0.5, 0.1, 0.6)])) == pytest.approx((0.5, 0.8))
    assert of_average([part, Figure(1.0)]) == Figure(0.75)
