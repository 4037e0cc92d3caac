"""Formats of figures, the same in terminals and on pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Show = Callable[[Any], str]
"""Returns the text of a value that is not None."""


def plain(value: object) -> str:
    """Return a value as it is."""
    return str(value)


def integer(value: float) -> str:
    """Return a number without decimals, in groups of three digits."""
    return f"{value:,.0f}"


def decimals(digits: int, suffix: str = "") -> Show:
    """Return a format with this many decimals."""
    return lambda value: f"{value:.{digits}f}{suffix}"


def percent(value: float) -> str:
    """Return a fraction as a percentage with one decimal."""
    # A value that rounds to zero has no sign.
    return f"{round(100 * value, 1) + 0.0:.1f}%"


def whole_percent(value: float) -> str:
    """Return a fraction as a percentage without decimals."""
    return f"{value:.0%}"


def megabytes(value: float) -> str:
    """Return bytes in units of 10^6; fewer than 50 kB keep two digits."""
    return f"{value / 1e6:.1f}" if value >= 50_000 or not value else f"{value / 1e6:.2g}"


def seconds(value: float) -> str:
    """Return seconds, with three decimals below 10."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def times(value: float) -> str:
    """Return a ratio, such as `x1.25`."""
    return f"x{value:.2f}"


def yes(value: bool) -> str:
    """Return yes or no."""
    return "yes" if value else "no"
