"""Summary of repeated figures: the median and the range."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Summary:
    """The median, the smallest and the largest figure, and all figures."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary | None":
        """Return the summary of figures; None without figures."""
        return cls(median(values), min(values), max(values), tuple(values)) if values else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def ratios(of: Sequence[float], to: Sequence[float]) -> Summary | None:
    """Divide round by round, because what slows a round slows both sides and cancels."""
    return Summary.of([a / b for a, b in zip(of, to, strict=False)])


def shown(summary: Summary | None, digits: int = 3) -> str:
    """`1.012 (0.998..1.031)`."""
    if summary is None:
        return "-"
    if len(summary.values) == 1:
        return f"{summary.median:.{digits}f}"
    return f"{summary.median:.{digits}f} ({summary.low:.{digits}f}..{summary.high:.{digits}f})"


def verdict(summary: Summary | None, target: float | None) -> str:
    """Return whether the median meets a target that is an upper bound, in words."""
    if summary is None or target is None:
        return "-"
    return "met" if summary.median <= target else "not met"
