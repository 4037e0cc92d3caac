"""Accuracy over the share that is held, of bytes or entries: the area under the curve, and how much can go."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from keepset.bench.analysis import intervals
from keepset.bench.analysis.intervals import Interval


@dataclass(frozen=True, eq=False)
class Curve:
    """A method under all its budgets, on a task or on the tasks of a group.

    The shares of the full cache that are held, means over the examples, fall; 1.0, the full cache, comes first.
    Each task's scores have one row per example, whose numbers differ, and one column per share; examples that lack a
    column are not in them.
    """

    shares: Float[np.ndarray, " points"]
    scores: tuple[Float[np.ndarray, "_ points"], ...]


def area(curve: Curve) -> tuple[float, Interval] | None:
    """Area under accuracy over shares (KVCompose's AUC, 2025, arXiv:2509.05165), as a mean score from 0 to 1.

    Trapezoids from the smallest share to 1.0, divided by that width; the paper says neither the rule nor the range. Of
    a group it is the mean over the tasks. It is a mean over examples of each one's own area, so its interval is that of
    a mean score. None where no budget dropped anything.
    """
    shares = curve.shares
    width = shares[0] - shares[-1]
    if width <= 0:
        return None
    gaps = (shares[:-1] - shares[1:]) / width
    parts = []
    for scores in curve.scores:
        # Rounded, so that an example right throughout has an area of 1, not one next to it.
        areas = (((scores[:, :-1] + scores[:, 1:]) / 2) @ gaps).round(12).tolist()
        interval = intervals.of_score(areas)
        if interval is None:
            return None
        parts.append((sum(areas) / len(areas), interval))
    return sum(value for value, _ in parts) / len(parts), intervals.of_average(parts)


def compression(curve: Curve, tolerance: float) -> tuple[float, Interval | None] | None:
    """The largest share that can go with a relative loss of accuracy of at most `tolerance`.

    KVCompose's Table 2, equations 6 to 8 and 10: the loss is (full cache's score - score) / full cache's score, its
    mean over the tasks of a group on which the full cache scores anything. Between two budgets it is taken to be
    linear, as the paper's figures suggest. Beyond the smallest budget nothing is known: there the answer means "at
    least". The interval is a bootstrap over examples, all budgets of an example drawn together; None where no draw
    differs. None altogether where the full cache scores nothing at all.
    """
    if not all(map(len, curve.scores)) or not any(scores[:, 0].any() for scores in curve.scores):
        return None
    removed = 1 - curve.shares
    value = float(_reach(removed, _losses([scores.mean(0, keepdims=True) for scores in curve.scores]), tolerance)[0])
    draws = _reach(
        removed, _losses([intervals.resampled(scores, seed) for seed, scores in enumerate(curve.scores)]), tolerance
    )
    examples = sum(map(len, curve.scores))
    if examples < 2 or np.nanmax(draws) - np.nanmin(draws) < 1e-9:
        return value, None
    return value, intervals.spread(draws, examples)


def _losses(means: list[Float[np.ndarray, "draws points"]]) -> Float[np.ndarray, "draws points"]:
    """Relative loss, the mean over those tasks on which the full cache scores anything; NaN where there is none."""
    full = np.stack([each[:, :1] for each in means])
    known = np.broadcast_to(full > 0, (len(means), *means[0].shape))
    losses = 1 - np.divide(np.stack(means), full, where=known, out=np.ones(known.shape))
    count = known.sum(0)
    return np.divide(losses.sum(0), count, where=count > 0, out=np.full(count.shape, np.nan))


def _reach(
    removed: Float[np.ndarray, " points"], losses: Float[np.ndarray, "draws points"], tolerance: float
) -> Float[np.ndarray, " draws"]:
    """The largest share removed at which the loss, linear between points, is within the tolerance."""
    before, after = losses[:, :-1], losses[:, 1:]
    within = before <= tolerance
    rise = np.where(after > before, after - before, 1.0)
    part = np.where(after <= tolerance, 1.0, np.where(within, (tolerance - before) / rise, np.nan))
    reached = removed[:-1] + part * np.diff(removed)
    # The full cache itself loses nothing, unless that is not known.
    return np.fmax.reduce(np.hstack([losses[:, :1], reached]), axis=1)
