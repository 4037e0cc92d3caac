"""Figures with 95 % intervals, which say how far a mean over examples can be trusted.

Every function takes one value per example. Questions and seeds of one example are averaged before, because they are
correlated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import numpy as np
from jaxtyping import Float

DRAWS = 2000
"""Number of samples of a bootstrap."""
Z = 1.959963984540054
"""The normal distribution has 95 % of its mass between -Z and Z."""


@dataclass(frozen=True)
class Figure:
    """A number and the ends of its 95 % interval, which are None if unknown."""

    value: float
    low: float | None = None
    high: float | None = None


def of_mean(values: Sequence[float]) -> Figure | None:
    """Return the mean of any numbers, with an interval if there are at least two; None without numbers.

    The interval is a seeded percentile bootstrap. Its percentiles lie further out than 2.5 and 97.5, by as much as a t
    interval is wider than a normal interval with the variance of a resampled mean (the expanded percentile interval,
    Hesterberg 2015, arXiv:1411.5279). Without that, ten examples would give 90 % instead of 95 %.
    """
    if len(values) < 2:
        return Figure(values[0]) if values else None
    draws = resampled(np.asarray(values, np.float64)[:, None])[:, 0]
    return Figure(fmean(values), *spread(draws, len(values)))


def of_score(values: Sequence[float]) -> Figure | None:
    """Return the mean score from 0 to 1, with its interval; None without examples.

    If all values are 0 or 1, or all are equal, it is Wilson's interval of a share, because resampling 12 successes of
    12 would give a width of zero. Wilson's is wide enough for equal values, because no score varies more than a share.
    """
    if not values or not (set(values) <= {0.0, 1.0} or len(set(values)) == 1):
        return of_mean(values)
    share, square = fmean(values), Z**2 / len(values)
    middle = share + square / 2
    margin = math.sqrt(square * share * (1 - share) + square**2 / 4)
    low, high = (middle - margin) / (1 + square), (middle + margin) / (1 + square)
    return Figure(share, max(min(low, share), 0.0), min(max(high, share), 1.0))


def of_difference(values: Sequence[float]) -> Figure | None:
    """Return the mean of two scores' differences on the same examples, with its interval; None without any.

    If all differences are -1, 0 or 1, or all are equal, it is the interval of Agresti & Min (2005) for matched pairs of
    successes and failures, which adds half a case to each of the four outcomes. So two recipes that answer the same 12
    of 12 are not called equal.
    """
    if not values or not (set(values) <= {-1.0, 0.0, 1.0} or len(set(values)) == 1):
        return of_mean(values)
    n = len(values) + 2
    mean = sum(values) / n
    margin = Z * math.sqrt(max((sum(value**2 for value in values) + 1) / n - mean**2, 0.0) / n)
    return Figure(fmean(values), max(mean - margin, -1.0), min(mean + margin, 1.0))


def of_average(parts: Sequence[Figure]) -> Figure:
    """Return the average of independent figures, with an interval if each of them has one.

    The distances of the ends are added like standard errors (MOVER, Zou & Donner 2008), so a part without spread counts
    with the width of its own interval.
    """
    mean = fmean(part.value for part in parts)
    below = [part.value - part.low for part in parts if part.low is not None]
    above = [part.high - part.value for part in parts if part.high is not None]
    if len(below) + len(above) < 2 * len(parts):
        return Figure(mean)
    return Figure(mean, mean - math.hypot(*below) / len(parts), mean + math.hypot(*above) / len(parts))


def resampled(values: Float[np.ndarray, "examples columns"], seed: int = 0) -> Float[np.ndarray, "draws columns"]:
    """Return the means of all columns in each bootstrap sample of the examples; a row is drawn with all its columns.

    Args:
        values: a row for each example, which is drawn with all its columns.
        seed: the seed of the samples.
    """
    # Without BLAS, whose threads slow each other down on a busy machine.
    return np.einsum("de,ec->dc", _weights(len(values), seed), values)


def spread(draws: Float[np.ndarray, " draws"], examples: int) -> tuple[float, float]:
    """Return the ends of a statistic's 95 % interval.

    Args:
        draws: the statistic's value in each bootstrap sample; NaN is left out.
        examples: how many examples a sample has.
    """
    tail = 0.5 * math.erfc(math.sqrt(examples / (examples - 1)) * _t(examples - 1) / math.sqrt(2))
    low, high = np.nanquantile(draws, [tail, 1 - tail])
    return float(low), float(high)


@lru_cache(maxsize=16)
def _weights(examples: int, seed: int) -> Float[np.ndarray, "draws examples"]:
    """Return how often each sample draws each example, as a share of its draws."""
    drawn = np.random.default_rng(seed).integers(examples, size=(DRAWS, examples))
    bins = drawn + examples * np.arange(DRAWS)[:, None]
    return np.bincount(bins.ravel(), minlength=DRAWS * examples).reshape(DRAWS, examples) / examples


@lru_cache
def _t(freedom: int) -> float:
    """Return the end of the interval around 0 that holds 95 % of Student's t."""
    step = 1e-4
    x = np.arange(0, 13, step)  # 12.7 with one degree of freedom
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    density = np.exp(scale - (freedom + 1) / 2 * np.log1p(x**2 / freedom))
    below = np.cumsum((density[1:] + density[:-1]) / 2) * step
    return float(x[1 + np.searchsorted(below, 0.475)])
