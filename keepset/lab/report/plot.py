"""Charts as data for plotly, with colours by the names of a page's style.

Plotly reads names and labels as a small HTML of its own, so they are escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

MARKS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "star", "cross", "x")
"""Plotly's symbols, as many as the style has colours; `page.js` draws the same shapes in legends and tables."""
DASHES = ("solid", "dash", "dot", "dashdot")
_WRAP = 44


def label(text: str) -> str:
    """Return a text escaped for plotly."""
    return escape(text, quote=False)


def wrapped(text: str) -> str:
    """Return a label with a line break after every 44 characters."""
    return "<br>".join(label(text[at : at + _WRAP]) for at in range(0, len(text), _WRAP))


def entry(name: str, series: int) -> tuple[str, int, str]:
    """Return a series' entry in the legend: its name, its colour's number and its symbol.

    Args:
        name: the series' name.
        series: the series' number, from 0.
    """
    return name, series, MARKS[series % len(MARKS)]


def axis(title: str, **options: Any) -> dict[str, Any]:
    """Return an axis with its title and further options of plotly."""
    return {"title": title, **options}


class Point(NamedTuple):
    """A point of a line.

    Attributes:
        x, y: its coordinates; a `y` that is None or not finite leaves a gap.
        hover: the text that is shown over it, escaped.
        low, high: the ends of its interval; None if it has none.
        is_hollow: whether its marker is hollow.
    """

    x: float
    y: float | None
    hover: str = ""
    low: float | None = None
    high: float | None = None
    is_hollow: bool = False


def line(name: str, points: Sequence[Point], series: int | str, **options: Any) -> dict[str, Any]:
    """Return a line of points.

    Args:
        name: the series' name.
        points: the points in their order.
        series: the number of a colour and a symbol, or the name of one of the style's colours.
        options: `group`, the legend's entry that shows and hides the line (`name` if not given); `symbol`, `size` and
            `dash`; and options of plotly.
    """
    mark = options.pop("symbol", MARKS[series % len(MARKS)] if isinstance(series, int) else "circle")
    trace: dict[str, Any] = {
        "name": label(name),
        "x": [point.x for point in points],
        "y": [point.y if point.y is not None and math.isfinite(point.y) else None for point in points],
        "series": series,
        "group": options.pop("group", name),
        "mode": "lines+markers",
        "line": {"dash": options.pop("dash", "solid")},
        "marker": {
            "symbol": [f"{mark}-open" if point.is_hollow else mark for point in points],
            "size": options.pop("size", 9),
        },
    }
    if any(point.hover for point in points):
        trace["hovertext"] = [point.hover for point in points]
    if any(point.high is not None for point in points):
        trace["error_y"] = {
            "array": [_gap(point.high, point.y) for point in points],
            "arrayminus": [_gap(point.y, point.low) for point in points],
        }
    return {**trace, **options}


def _gap(high: float | None, low: float | None) -> float:
    return 0 if high is None or low is None else high - low


def plot(
    name: str,
    traces: Sequence[dict[str, Any]],
    x: dict[str, Any],
    y: dict[str, Any],
    *,
    height: str = "",
    shapes: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return a chart.

    Args:
        name: the chart's id in the document.
        traces: what is drawn, made by `line`.
        x: the horizontal axis, made by `axis`.
        y: the vertical axis.
        height: the height in CSS; the style's if empty.
        shapes: plotly's shapes, with `stroke` as the name of a colour.
    """
    layout = {"xaxis": x, "yaxis": y, "shapes": list(shapes)}
    return {"id": name, "traces": list(traces), "layout": layout, "height": height}


def plots(
    title: str, charts: Sequence[dict[str, Any]], legend: Sequence[tuple[str, int | str, str]] = (), note: str = ""
) -> dict[str, Any]:
    """Return a section of charts side by side.

    Args:
        title: the heading.
        charts: the charts, made by `plot`.
        legend: one legend for all of them, made by `entry`.
        note: the words below.
    """
    return {"kind": "plots", "title": title, "plots": list(charts), "legend": list(legend), "note": note}
