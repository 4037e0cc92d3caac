"""Areas and what can go, against drawn lines and figures by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset.lab.analysis.curves import Curve, area, compression
from keepset.lab.analysis.intervals import Figure
from tests.lab.analysis.test_intervals import ends

EMPTY = Curve(np.array([1.0, 0.5]), (np.empty((0, 2)),))


def curve(shares: list[float], *tasks: list[list[float]]) -> Curve:
    return Curve(np.array(shares), tuple(np.array(task, dtype=float) for task in tasks))


def test_area_by_hand() -> None:
    # Means 1.0, 0.75, 0.25 at shares 1.0, 0.5, 0.25: (0.5 * 0.875 + 0.25 * 0.5) / 0.75.
    task: list[list[float]] = [[1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]]
    measured = area(curve([1.0, 0.5, 0.25], task))
    assert measured is not None and measured.value == pytest.approx(0.75)
    low, high = ends(measured)
    assert low < 0.75 < high <= 1
    # The mean of two tasks' areas, 0.75 and 0.
    both = area(curve([1.0, 0.5, 0.25], task, [[0, 0, 0]]))
    assert both is not None and both.value == pytest.approx(0.375)
    perfect = area(curve([1.0, 0.7, 0.3], [[1, 1, 1]] * 12))
    assert perfect is not None and perfect.value == 1.0 and ends(perfect) == pytest.approx((0.7575, 1), abs=1e-3)
    for without in (curve([1.0], [[1]]), curve([1.0, 1.0], [[1, 1]]), EMPTY):
        assert area(without) is None


@given(
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=5, unique=True),
    st.integers(1, 5).flatmap(lambda n: st.lists(st.integers(0, 4), min_size=6 * n, max_size=6 * n)),
)
def test_area_is_that_of_the_drawn_line(shares: list[float], quarters: list[int]) -> None:
    falling = [1.0, *sorted(shares, reverse=True)]
    scores = np.array(quarters).reshape(-1, 6)[:, : len(falling)] / 4
    measured = area(Curve(np.array(falling), (scores,)))
    assert measured is not None
    rising, means = falling[::-1], scores.mean(0)[::-1]
    drawn = np.interp(np.linspace(rising[0], 1, 2001), rising, means).mean()
    # Steep pieces that are narrower than the grid are the grid's error, not the area's.
    assert measured.value == pytest.approx(drawn, abs=4 / 2000 / (1 - rising[0]))
    assert ends(measured)


# Means 0.8, 0.8, 0.4 at shares 1.0, 0.5, 0.25: 10 % of 0.8 are lost a fifth of the way from 0.5 to 0.25 removed.
FLAT = curve([1.0, 0.5, 0.25], [[1, 1, 0.5], [1, 1, 0.5], [0.4, 0.4, 0.2]])
# The paper's SnapKV: a loss of 29 % at 10 % removed allows 6.9 % and 3.4 %.
PAPER = curve([1.0, 0.9], [[1, 0.71]])
# Losses at 0.5 removed: 0 of 1.0, half of 0.2; mean 25 %.
TWO_TASKS = curve([1.0, 0.5], [[1, 1]], [[0.2, 0.1]])
LOST: list[list[float]] = [[1, 0.5], [1, 0]]


@pytest.mark.parametrize(
    ("of", "tolerance", "expected"),
    [
        *((FLAT, *each) for each in ((0.0, 0.5), (0.1, 0.55), (0.2, 0.6), (0.5, 0.75), (1.0, 0.75))),
        *((PAPER, *each) for each in ((0.2, 0.1 * 0.2 / 0.29), (0.1, 0.1 * 0.1 / 0.29))),
        # The largest share counts where the loss falls again, the way down only from where it is within the tolerance.
        (curve([1.0, 0.8, 0.6, 0.4], [[1, 0.5, 0.95, 0.85]]), 0.1, 0.5),
        (curve([1.0, 0.8, 0.6], [[1, 0.5, 0.7]]), 0.1, 0.2 * 0.1 / 0.5),
        # A loss that is just within it at one point goes on from there.
        (curve([1.0, 0.5, 0.25], [[1, 0.75, 0.25]]), 0.25, 0.5),
        (TWO_TASKS, 0.1, 0.2),
        (TWO_TASKS, 0.25, 0.5),
        # A task on which nothing can be lost is left out.
        (curve([1.0, 0.5], LOST), 0.3, 0.2),
        (curve([1.0, 0.5], LOST, [[0, 0]]), 0.3, 0.2),
        # Better than the full cache is no loss.
        (curve([1.0, 0.5], [[0, 1], [1, 1]]), 0.0, 0.5),
    ],
)
def test_what_can_go_by_hand(of: Curve, tolerance: float, expected: float) -> None:
    measured = compression(of, tolerance)
    assert measured is not None and measured.value == pytest.approx(expected)
    if len({tuple(example / example[0]) for scores in of.scores for example in scores if example[0]}) == 1:
        assert measured.low is None  # every example loses the same part


def test_where_the_full_cache_has_no_score_nothing_can_be_lost() -> None:
    assert compression(curve([1.0, 0.5], [[0, 0], [0, 1]]), 0.1) is None
    assert compression(EMPTY, 0.1) is None
    # A quarter of the draws misses the only example that the full cache answers; in the others all of it is lost.
    measured = compression(curve([1.0, 0.5], [[1, 0], [0, 0]]), 0.3)
    assert measured == Figure(pytest.approx(0.15))
    # Of two tasks the other one counts.
    measured = compression(curve([1.0, 0.5], [[1, 0], [0, 0]], [[1, 0.5], [1, 0.5]]), 0.3)
    assert ends(measured) == pytest.approx((0.5 * 0.3 / 0.75, 0.5 * 0.3 / 0.5))


def test_the_interval_of_compression_holds_the_truth() -> None:
    """Of examples that are all found by the full cache, 80 % at half and 40 % at a quarter: 0.2 is lost at a half."""
    random = np.random.default_rng(0)
    hits, simulations = 0, 200
    for _ in range(simulations):
        luck = random.random(60)
        scores = np.stack([np.ones(60), luck < 0.8, luck < 0.4], axis=1).astype(float)
        low, high = ends(compression(Curve(np.array([1.0, 0.5, 0.25]), (scores,)), 0.3))
        hits += low <= 0.5 + 0.25 * 0.1 / 0.4 <= high
    assert 0.95 - 3 * math.sqrt(0.95 * 0.05 / simulations) <= hits / simulations < 1
