"""The table and the page of `keepset tune`."""

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
"""A recipe's figures, as `keepset tune --json` writes them."""
_NATS = decimals(4)
_GROUPS: dict[str, tuple[str, str, str, int]] = {
    "used": ("--good", "★", "star", 15),
    "cannot be told from it": ("--c1", "◆", "diamond", 10),
    "last round": ("--c0", "●", "circle", 9),
    "out before": ("--c7", "○", "circle-open", 8),
}
"""Groups of recipes, the best first: a colour, a mark, plotly's symbol and its size."""


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
    for row in rows:
        group = _group(row, result)
        style = {"used": "bold", "cannot be told from it": "bold", "out before": "dim"}.get(group, "")
        colour, mark, *_ = _GROUPS[group]
        made.add(row["recipe"], row, style=style, mark=(mark, colour))
    made.lines += [Line(each["recipe"], error=each["reason"]) for each in result["dropped"]]
    return made


def render(result: dict[str, Any]) -> str:
    """Return the page of what `keepset tune --json` prints."""
    rows, asked, full = result["rows"], result["facts"] > 0, result["full"]
    groups = [name for name in _GROUPS if any(_group(row, result) == name for row in rows)]
    names = {name: result["recipe"] if name == "used" else name for name in groups}
    legend = [(names[name], _GROUPS[name][0], _GROUPS[name][1]) for name in groups]
    log = plot.axis("KL divergence, nats (log scale)", type="log", zeroline=False, tickformat="~g")
    charts = [_chart("kl", "KL divergence against the prefill", result, names, _NATS, log)]
    if asked:
        shares = plot.axis("facts found", tickformat=".0%", range=[-0.03, 1.03])
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
                f"Further left is cheaper{better}. Lines are intervals of 95 % over pieces. Recipes that were out "
                "before the last round saw fewer.",
            ),
            table(result).section(
                "Figures",
                note="★ the recipe to use, ◆ what cannot be told from it. KL is that of the full cache's predictions "
                "from the recipe's, a mean per token; lower is better. The prefill is the time of one with the "
                "recipe, divided by that of one with the full cache.",
            ),
        ],
        result,
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


def _group(row: TuneRow, result: dict[str, Any]) -> str:
    if row["recipe"] == result["recipe"]:
        return "used"
    if row["recipe"] in result["tied"]:
        return "cannot be told from it"
    return "last round" if row["finalist"] else "out before"


def _chart(
    name: str, title: str, result: dict[str, Any], names: dict[str, str], show: Show, y: dict[str, Any]
) -> dict[str, Any]:
    """Return a figure against what it costs, a series per group of recipes."""
    lines = []
    for group, shown in names.items():
        colour, _, symbol, size = _GROUPS[group]
        rows = [row for row in result["rows"] if _group(row, result) == group and row[name]["mean"] is not None]
        points = []
        for row in rows:
            hover = f"{plot.wrapped(row['recipe'])}<br>{interval(row[name], show)}, {_pieces(row['pieces'])}"
            points.append(plot.Point(_cost(row), row[name]["mean"], hover, row[name]["low"], row[name]["high"]))
        lines.append(plot.line(shown, points, colour, mode="markers", symbol=symbol, size=size))
    return plot.plot(name, lines, plot.axis("prefill, of the full cache's", tickprefix="x"), y, title=title)
