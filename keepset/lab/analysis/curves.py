"""Accuracy over the share of bytes or entries that is held: the area under the curve, and how much can be dropped."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from keepset.lab.analysis.intervals import Figure, of_average, of_score, resampled, spread


@dataclass(frozen=True, eq=False)
class Curve:
    """A method's scores under all its budgets, on a task or on the tasks of a group.

    Attributes:
        shares: the mean held share of the full cache, falling, `[points]`; the first is 1.0, the full cache.
        scores: scores of every task, `[examples, points]`; examples that lack a point are left out.
    """

    shares: Float[np.ndarray, " points"]
    scores: tuple[Float[np.ndarray, "_ points"], ...]


def area(curve: Curve) -> Figure | None:
    """Return the area under accuracy over shares, from 0 to 1, with its interval; None if no budget dropped anything.

    KVCompose (2025, arXiv:2509.05165) calls it AUC and gives neither rule nor range. In keepset, trapezoids cover the
    smallest share to 1.0, and their sum is divided by that width. The area of a group is the mean over its tasks. An
    area is a mean over the examples' own areas, so its interval is that of a mean score.
    """
    shares = curve.shares
    width = shares[0] - shares[-1]
    if width <= 0:
        return None
    gaps = (shares[:-1] - shares[1:]) / width
    parts = []
    for scores in curve.scores:
        # Rounded, so that an example that is always right has an area of exactly 1.
        areas = (((scores[:, :-1] + scores[:, 1:]) / 2) @ gaps).round(12).tolist()
        if (figure := of_score(areas)) is None:
            return None
        parts.append(figure)
    return of_average(parts)


def compression(curve: Curve, tolerance: float) -> Figure | None:
    """Return the largest share that can be dropped at a relative loss of accuracy up to `tolerance`, and its interval.

    KVCompose's Table 2, equations 6 to 8 and 10: the loss is (full cache's score - score) / full cache's score. The
    loss of a group is the mean over the tasks with a nonzero score of the full cache. The loss is taken as linear
    between two budgets, as the paper's figures suggest. Nothing is known beyond the smallest budget, so a result there
    means "at least".

    Args:
        curve: the method's shares and scores.
        tolerance: the relative loss that is allowed, such as 0.1.

    Returns:
        The share, with a bootstrap interval over examples, if any draw differs; all budgets of an example are drawn
        together. None if the full cache scores zero.
    """
    if not all(map(len, curve.scores)) or not any(scores[:, 0].any() for scores in curve.scores):
        return None
    removed = 1 - curve.shares
    value = float(_reach(removed, _losses([scores.mean(0, keepdims=True) for scores in curve.scores]), tolerance)[0])
    losses = _losses([resampled(scores, seed) for seed, scores in enumerate(curve.scores)])
    draws, examples = _reach(removed, losses, tolerance), sum(map(len, curve.scores))
    if examples < 2 or np.nanmax(draws) - np.nanmin(draws) < 1e-9:
        return Figure(value)
    return Figure(value, *spread(draws, examples))


def _losses(means: list[Float[np.ndarray, "draws points"]]) -> Float[np.ndarray, "draws points"]:
    """Return the mean relative loss over the tasks with a nonzero score of the full cache; NaN if there are none."""
    full = np.stack([mean[:, :1] for mean in means])
    scored = np.broadcast_to(full > 0, (len(means), *means[0].shape))
    losses = 1 - np.divide(np.stack(means), full, where=scored, out=np.ones(scored.shape))
    count = scored.sum(0)
    return np.divide(losses.sum(0), count, where=count > 0, out=np.full(count.shape, np.nan))


def _reach(
    removed: Float[np.ndarray, " points"], losses: Float[np.ndarray, "draws points"], tolerance: float
) -> Float[np.ndarray, " draws"]:
    """Return the largest share that can be removed within the tolerance; the loss is linear between points.

    Args:
        removed: the share that each point removes, rising.
        losses: the loss at each point.
        tolerance: the largest loss that is allowed.
    """
    before, after = losses[:, :-1], losses[:, 1:]
    within = before <= tolerance
    rise = np.where(after > before, after - before, 1.0)
    part = np.where(after <= tolerance, 1.0, np.where(within, (tolerance - before) / rise, np.nan))
    reached = removed[:-1] + part * np.diff(removed)
    # The full cache itself has no loss, unless the loss is unknown.
    return np.fmax.reduce(np.hstack([losses[:, :1], reached]), axis=1)
