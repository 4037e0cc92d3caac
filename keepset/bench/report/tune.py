"""The table and the page of `keepset tune`."""

import math
from collections.abc import Sequence
from typing import Any

from keepset.bench.report import plot
from keepset.bench.report.page import page
from keepset.bench.report.table import (
    Column,
    Line,
    Show,
    Table,
    decimals,
    filled,
    integer,
    megabytes,
    percent,
    times,
    whole_percent,
    with_interval,
)

TuneRow = dict[str, Any]
"""A recipe's figures in the JSON of `keepset tune --json`."""
_NATS = decimals(4)
_USED, _TIED, _FRONTIER, _OTHERS = "used", "cannot be told from it", "no other is cheaper and better", "others"
_GROUPS: dict[str, tuple[str, str, int]] = {
    _USED: ("--good", "star", 16),
    _TIED: ("--c1", "diamond", 11),
    _FRONTIER: ("--c0", "circle", 9),
    _OTHERS: ("--c7", "circle-open", 6),
}
"""Groups of recipes, the best first: a colour, plotly's symbol and its size."""


def table(result: dict[str, Any]) -> Table:
    """Return the figures of all recipes, the best first, then those that have none."""
    rows = result["rows"]
    columns = [
        Column("pieces", lambda row: row["pieces"], rank=3),
        Column("MB", lambda row: row["kv_bytes"], megabytes, rank=2),
        Column("of 16-bit", lambda row: row["share"], percent, "full cache"),
        Column("KL", lambda row: row["kl"]["mean"], _NATS, "nats"),
        Column("95 %", lambda row: _ends(row["kl"], _NATS), rank=1),
        Column("top-1", lambda row: row["top1"], whole_percent),
        Column("prefill", _cost, times, rank=4),
        Column("found", lambda row: row.get("found", {}).get("mean"), whole_percent),
        Column("95 %", lambda row: _ends(row.get("found", {}), whole_percent), rank=1),
    ]
    made = Table("recipe", filled(columns, rows))
    groups = _groups(result, "kl")
    for row in rows:
        group = groups[row["recipe"]]
        style = "bold" if group in (_USED, _TIED) else "" if row["finalist"] else "dim"
        colour, symbol, _ = _GROUPS[group]
        made.add(row["recipe"], row, style=style, mark=(symbol, colour))
    made.lines += [Line(each["recipe"], error=each["reason"]) for each in result["dropped"]]
    return made


def render(result: dict[str, Any]) -> str:
    """Return the page of the result of `keepset tune --json`."""
    asked, full = result["facts"] > 0, result["full"]
    measures = ["kl", "found"] if asked else ["kl"]
    there = {group for measure in measures for group in _groups(result, measure).values()}
    names = {name: result["recipe"] if name == _USED else name for name in _GROUPS if name in there}
    legend = [(shown, *_GROUPS[name][:2]) for name, shown in names.items()]
    log = plot.axis("KL divergence, nats (log scale)", type="log", zeroline=False, tickformat="~g", dtick="D2")
    charts = [_chart("kl", "KL divergence against the prefill", result, names, _NATS, log)]
    if asked:
        shares = plot.axis("facts found", tickformat=".0%", range=[-0.03, 1.08])
        charts.append(_chart("found", "Facts found against the prefill", result, names, whole_percent, shares))
    better = "; a lower KL is better, and so are more facts" if asked else ", lower is better"
    done = str(result["rounds"]) if result["round"] == result["rounds"] else f"{result['round']} of {result['rounds']}"
    return page(
        "keepset tune",
        result["model"],
        [
            plot.plots(
                "What recipes are worth, and what they cost",
                charts,
                legend,
                f"Further left is cheaper{better}. Steps join the recipes of which no other is both cheaper and "
                "better; point at a mark for its name. Bars are intervals of 95 % over pieces. Recipes that were out "
                "before the last round saw fewer.",
            ),
            table(result).section(
                "Figures",
                note="Star: the recipe to use. Diamond: what cannot be told from it. KL is that of the full cache's "
                "predictions from the recipe's, a mean per token; lower is better. The prefill is the time of one with "
                "the recipe, divided by that of one with the full cache.",
            ),
        ],
        conclusion=" ".join(result["verdict"]),
        lead=_lead(result, asked),
        facts=[
            ("Budget", result["budget"]),
            ("Rounds", done),
            ("Full KV cache", None if full["kv_bytes"] is None else f"{megabytes(full['kv_bytes'])} MB"),
            ("Found by the full cache", interval(full["found"], whole_percent) if asked else None),
        ],
    )


def interval(figure: dict[str, float | None], show: Show) -> str:
    """Return a mean with its interval in brackets; "not asked yet" if there is no mean."""
    if figure["mean"] is None:
        return "not asked yet"
    return with_interval(figure["mean"], figure.get("low"), figure.get("high"), show)


def _lead(result: dict[str, Any], asked: bool) -> str:
    facts = f", and they are asked for {result['facts']} facts that were hidden in each piece." if asked else "."
    return (
        f"Recipes compress up to {_pieces(result['pieces'])} of the text, {integer(result['tokens'])} tokens each, "
        f"with the same budget. Their predictions over the next {integer(result['continuation_tokens'])} tokens are "
        f"compared with those of the full cache{facts} After every round the better half of the recipes goes on to "
        "more pieces."
    )


def _pieces(count: int) -> str:
    return "1 piece" if count == 1 else f"{count} pieces"


def _ends(figure: dict[str, float | None], show: Show) -> str | None:
    low, high = figure.get("low"), figure.get("high")
    return None if low is None or high is None else f"{show(low)}..{show(high)}"


def _cost(row: TuneRow) -> float:
    return row["prefill_seconds"] / row["prefill_seconds_full"]


def _value(row: TuneRow, measure: str) -> float | None:
    """Return a figure's mean if a chart can show it."""
    mean = row[measure]["mean"]
    return mean if mean is not None and math.isfinite(mean) else None


def _frontier(rows: Sequence[TuneRow], measure: str) -> list[TuneRow]:
    """Return the recipes for which no other is both cheaper and better, the cheapest first."""
    sign = 1 if measure == "kl" else -1
    best, frontier = math.inf, []
    known = [(row, value) for row in rows if (value := _value(row, measure)) is not None]
    for row, value in sorted(known, key=lambda each: (_cost(each[0]), sign * each[1])):
        if sign * value < best:
            best = sign * value
            frontier.append(row)
    return frontier


def _groups(result: dict[str, Any], measure: str) -> dict[str, str]:
    """Return the group of every recipe in the chart of a figure."""
    frontier = {row["recipe"] for row in _frontier(result["rows"], measure)}

    def group(recipe: str) -> str:
        if recipe == result["recipe"]:
            return _USED
        return _TIED if recipe in result["tied"] else _FRONTIER if recipe in frontier else _OTHERS

    return {row["recipe"]: group(row["recipe"]) for row in result["rows"]}


def _chart(
    measure: str, title: str, result: dict[str, Any], names: dict[str, str], show: Show, y: dict[str, Any]
) -> dict[str, Any]:
    """Return a chart of a figure over its cost: the frontier as steps, and a series per group of recipes."""
    groups = _groups(result, measure)
    rows = [row for row in result["rows"] if _value(row, measure) is not None]
    steps = [plot.Point(_cost(row), _value(row, measure)) for row in _frontier(rows, measure)]
    chart = [plot.line("frontier", steps, "--c0", group=names.get(_FRONTIER, ""), mode="lines", shape="hv")]
    chart[0]["hoverinfo"] = "skip"
    # The most important groups are drawn last, above the others.
    for group, shown in reversed(names.items()):
        colour, symbol, size = _GROUPS[group]
        points = []
        for row in (row for row in rows if groups[row["recipe"]] == group):
            hover = f"{plot.wrapped(row['recipe'])}<br>{interval(row[measure], show)}, {_pieces(row['pieces'])}"
            ends = (None, None) if group == _OTHERS else (row[measure]["low"], row[measure]["high"])
            points.append(plot.Point(_cost(row), row[measure]["mean"], hover, *ends))
        chart.append(plot.line(shown, points, colour, mode="markers", symbol=symbol, size=size))
    x = plot.axis("prefill, of the full cache's", tickprefix="x")
    return plot.plot(measure, chart, x, y, title=title, height="430px")
