"""Charts as data: what plotly draws, with colours by the names of a page's style.

Plotly reads names and labels as a small HTML of its own, so they are escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

MARKS = (("circle", "●"), ("square", "■"), ("diamond", "◆"), ("triangle-up", "▲"), ("triangle-down", "▼"))
"""Plotly's symbols, and the characters of a legend that look like them."""
DASHES = ("solid", "dash", "dot", "dashdot")
_WRAP = 44


def label(text: str) -> str:
    """Return a text that plotly shows as it is."""
    return escape(text, quote=False)


def wrapped(text: str) -> str:
    """Return a label that goes on in a next line after every 44 characters."""
    return "<br>".join(label(text[at : at + _WRAP]) for at in range(0, len(text), _WRAP))


def symbol(series: int) -> str:
    """Return the plotly symbol of a series."""
    return MARKS[series % len(MARKS)][0]


def entry(name: str, series: int) -> tuple[str, int, str]:
    """Return a series' entry in the legend: its name, its colour's number and its mark."""
    return name, series, MARKS[series % len(MARKS)][1]


def axis(title: str, **options: Any) -> dict[str, Any]:
    """Return an axis with its title and further options of plotly."""
    return {"title": title, **options}


def log_axis(title: str) -> dict[str, Any]:
    """Return a logarithmic axis."""
    return axis(title, type="log", zeroline=False, tickformat="~g")


def line(
    name: str,
    x: Sequence[float],
    y: Sequence[float | None],
    series: int | str,
    *,
    hover: Sequence[str] | None = None,
    ends: Sequence[tuple[float | None, float | None]] | None = None,
    group: str | None = None,
    mode: str = "lines+markers",
    dash: str = "solid",
    shape: str = "linear",
    marker: dict[str, Any] | None = None,
    template: str | None = None,
) -> dict[str, Any]:
    """Return a line of points.

    Args:
        name: the series' name.
        x: where points are, `[points]`.
        y: how high they are, `[points]`; None or a number that is not finite leaves a gap.
        series: the number of a colour, or the name of one of the style's.
        hover: what is shown over each point, `[points]`, escaped.
        ends: the ends of each point's interval, `[points]`; None if it has none.
        group: the legend's entry that shows and hides the line; `name` if None.
        mode: plotly's mode.
        dash: plotly's dash of the line.
        shape: plotly's shape of the line.
        marker: plotly's options of markers.
        template: plotly's template of what is shown over a point, without `hover`.
    """
    known = [value if value is not None and math.isfinite(value) else None for value in y]
    trace: dict[str, Any] = {
        "name": label(name), "x": list(x), "y": known, "series": series, "group": name if group is None else group,
        "mode": mode, "line": {"dash": dash, "shape": shape}, "marker": marker or {},
    }  # fmt: skip
    if hover is not None:
        trace["hovertext"] = list(hover)
    if template is not None:
        trace["hovertemplate"] = f"{template}<extra>{label(name)}</extra>"
    if ends is not None:
        low, high = ([each[side] for each in ends] for side in (0, 1))
        trace["error_y"] = {"array": _gaps(high, known), "arrayminus": _gaps(known, low)}
    return trace


def _gaps(upper: Sequence[float | None], lower: Sequence[float | None]) -> list[float]:
    pairs = zip(upper, lower, strict=True)
    return [0 if high is None or low is None else high - low for high, low in pairs]


def heatmap(z: Sequence[Sequence[float | None]], scale: str, template: str, **options: Any) -> dict[str, Any]:
    """Return a heat map of rows.

    Args:
        z: the values, `[rows, columns]`.
        scale: `share` from the page's colour to a strong one, `difference` from cold to warm.
        template: plotly's template of what is shown over a cell.
        options: further options of plotly.
    """
    return {
        "type": "heatmap",
        "z": z,
        "scale": scale,
        "xgap": 1,
        "hovertemplate": f"{template}<extra></extra>",
        **options,
    }


def plot(
    name: str,
    traces: Sequence[dict[str, Any]],
    x: dict[str, Any],
    y: dict[str, Any],
    *,
    title: str = "",
    height: str = "",
    shapes: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return a chart.

    Args:
        name: its id in the document.
        traces: made by `line` or `heatmap`.
        x, y: made by `axis`.
        title: stands above it.
        height: in CSS; the style's if empty.
        shapes: plotly's shapes, with `fill` and `stroke` as names of colours.
    """
    layout = {"xaxis": x, "yaxis": y, "shapes": list(shapes)}
    return {"id": name, "title": title, "traces": list(traces), "layout": layout, "height": height}


def plots(
    title: str, charts: Sequence[dict[str, Any]], legend: Sequence[tuple[str, int | str, str]] = (), note: str = ""
) -> dict[str, Any]:
    """Return a section of charts side by side, with one legend for all of them."""
    return {"kind": "plots", "title": title, "plots": list(charts), "legend": list(legend), "note": note}


def markers(series: int, hollow: Sequence[bool]) -> dict[str, Any]:
    """Return the markers of a series, some of which are hollow."""
    return {"symbol": [symbol(series) + ("-open" if each else "") for each in hollow], "size": 9}
