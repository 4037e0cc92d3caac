"""The table and the page of `keepset bench latency`."""

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from keepset.bench.report import plot
from keepset.bench.report.page import page
from keepset.bench.report.table import Column, Line, Table, decimals, integer, megabytes

_LEAST_ROUNDS = 3
"""Rounds below which nothing is concluded."""
LatencyRow = dict[str, Any]
"""A recipe's figures at one length, as `keepset bench latency --json` writes them."""

_OF_ROUND: dict[str, tuple[str, str, Callable[[LatencyRow, LatencyRow], float | None]]] = {
    "first_seconds": ("Time to the first token", "seconds", lambda each, _: each["first_seconds"]),
    "tokens_per_second": (
        "Tokens per second after it",
        "tokens per second",
        lambda each, row: (row["output_tokens"] - 1) / each["rest_seconds"],
    ),
    "seconds": ("Time of the whole request", "seconds", lambda each, _: each["first_seconds"] + each["rest_seconds"]),
    "kv_bytes": ("KV cache at the end", "MB", lambda each, _: each["kv_bytes"]),
    "peak_bytes": ("Peak memory", "MB", lambda each, _: each["peak_bytes"]),
}
"""By the names of figures: a chart's title, its unit, and what a round says."""


def table(rows: Sequence[LatencyRow]) -> Table:
    """Return the medians of every recipe, grouped by the prompt's length."""
    ranks = {"peak_bytes": 2, "seconds": 1}
    titles = ("first token", "tokens/s", "latency", "KV cache, MB", "peak, MB")
    shows = (decimals(2, " s"), decimals(1), decimals(2, " s"), megabytes, megabytes)
    made = Table(
        "recipe",
        [
            Column(title, lambda row, name=name: row[name], show, rank=ranks.get(name, 0))
            for title, name, show in zip(titles, _OF_ROUND, shows, strict=True)
        ],
    )
    for row in rows:
        tokens, recipe = integer(row["prompt_tokens"]), row["recipe"]
        if row["error"] is None:
            made.add(f"{recipe}, {tokens} tokens", row, heading=f"{tokens} tokens of prompt", short=recipe)
        else:
            made.lines.append(Line(f"{recipe}, {tokens} tokens", error=row["error"]))
    return made


def render(result: dict[str, Any]) -> str:
    """Return the page of what `keepset bench latency --json` writes."""
    rows = [row for row in result["rows"] if row["error"] is None]
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    lengths = sorted({row["prompt_tokens"] for row in rows})
    draw = _bars if len(lengths) == 1 else _chart
    charts = [draw(name, rows, recipes) for name in _OF_ROUND if any(row[name] is not None for row in rows)]
    title, legend = "By length of the prompt", [plot.entry(recipe, _series(at)) for at, recipe in enumerate(recipes)]
    if len(lengths) == 1:
        title, legend = f"After {integer(lengths[0])} tokens of prompt", []
    note = "Medians; the thin lines reach from the smallest to the largest round."
    return page(
        "keepset bench latency",
        result["model"],
        [plot.plots(title, charts, legend, note), table(result["rows"]).section("Figures")],
        result,
        conclusion=conclusion(result["rows"]),
        lead=f"{integer(result['output_tokens'])} tokens generated after each prompt, {result['rounds']} rounds in "
        "turns.",
        facts=[("Device", result["device"]), ("Precision", result["dtype"])],
    )


def _series(at: int) -> int:
    """Return the colour of a recipe; the full cache, which comes first, is grey."""
    return at - 1 + (at > 7) if at else 7


def _point(name: str, row: LatencyRow) -> plot.Point:
    """Return a figure's median at a row's length, with the ends of its rounds."""
    _, unit, of_round = _OF_ROUND[name]
    scale = 1e-6 if unit == "MB" else 1.0
    rounds = [value for each in row["rounds"] if (value := of_round(each, row)) is not None]
    low, high = min(rounds) * scale, max(rounds) * scale
    return plot.Point(row["prompt_tokens"], row[name] * scale, low=low, high=high)


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else integer(value)


def _bars(name: str, rows: Sequence[LatencyRow], recipes: Sequence[str]) -> dict[str, Any]:
    """Return a figure's chart where all prompts have one length: a bar for each recipe."""
    title, unit, _ = _OF_ROUND[name]
    known = [row for row in rows if row[name] is not None]
    series = [_series(recipes.index(row["recipe"])) for row in known]
    made = plot.bars([row["recipe"] for row in known], [_point(name, row) for row in known], series, _short)
    y = plot.axis("recipe", autorange="reversed", showgrid=False, ticksuffix=" ")
    return plot.plot(name, [made], plot.axis(unit, rangemode="tozero"), y, title=title)


def _chart(name: str, rows: Sequence[LatencyRow], recipes: Sequence[str]) -> dict[str, Any]:
    title, unit, _ = _OF_ROUND[name]
    lines = []
    for at, recipe in enumerate(recipes):
        points = [_point(name, row) for row in rows if row["recipe"] == recipe and row[name] is not None]
        template = f"%{{x}} tokens: %{{y:.2f}} {unit}"
        lines.append(plot.line(recipe, points, _series(at), dash="solid" if at else "dash", template=template))
    x, y = plot.axis("tokens of the prompt", rangemode="tozero"), plot.axis(unit, rangemode="tozero")
    return plot.plot(name, lines, x, y, title=title)


def conclusion(rows: Sequence[LatencyRow]) -> str:
    """Return how the fastest recipe after the longest prompt compares with the full cache, which comes first.

    Rounds are compared one by one, because recipes and full cache took turns. Recipes whose ranges overlap are a tie,
    of which the one that holds least is named. It is "" if the full cache or all recipes have no figures, or rounds are
    missing.
    """
    longest = max((row["prompt_tokens"] for row in rows), default=0)
    known = [row for row in rows if row["prompt_tokens"] == longest and row.get("tokens_per_second") is not None]
    if len(known) < 2 or known[0]["recipe"] != rows[0]["recipe"]:
        return ""
    full, *others = known
    rounds = len(full["rounds"])
    if any(len(row["rounds"]) != rounds for row in others):
        return ""
    if rounds < _LEAST_ROUNDS:
        return f"Nothing can be concluded from {rounds} of the {_LEAST_ROUNDS} rounds that a comparison needs."
    speeds = [_span(row, full, "tokens_per_second") for row in others]
    fastest = max(speeds, key=lambda speed: speed.middle)
    tied = [at for at, speed in enumerate(speeds) if speed.high >= fastest.low]
    at = min(tied, key=lambda at: others[at]["kv_bytes"])
    row, speed, first = others[at], speeds[at], _span(others[at], full, "first_seconds")
    beside = [others[each]["recipe"] for each in tied if each != at]
    which = f"{row['recipe']}, a tie with {', '.join(beside)}," if beside else row["recipe"]
    return (
        f"After {longest:,} tokens {which} makes {speed} the full cache's tokens a second (more is better) and holds "
        f"{row['kv_bytes'] / full['kv_bytes']:.0%} of its bytes; the first token takes {first} as long (less is "
        f"better). Ranges are over {rounds} rounds; one that holds 1 is a tie."
    )


class _Span(NamedTuple):
    """The median, the smallest and the largest ratio of the rounds."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}..{self.high:.2f}) times"


def _span(row: LatencyRow, full: LatencyRow, name: str) -> _Span:
    of_round = _OF_ROUND[name][2]
    pairs = zip(row["rounds"], full["rounds"], strict=True)
    ratios = [(of_round(own, row) or 0.0) / (of_round(others, full) or math.inf) for own, others in pairs]
    return _Span(median(ratios), min(ratios), max(ratios))
