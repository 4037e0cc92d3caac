"""The tables and the page of `keepset results`."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from keepset.lab.analysis.events import REGION
from keepset.lab.analysis.intervals import Figure
from keepset.lab.analysis.rows import Row
from keepset.lab.analysis.summary import NeedleMap, Summary, Trade, counted
from keepset.lab.record import FULL
from keepset.lab.report import plot
from keepset.lab.report.page import Section, choice, page
from keepset.lab.report.table import (
    Column,
    Table,
    decimals,
    filled,
    integer,
    megabytes,
    percent,
    seconds,
    with_interval,
)

_FEW = 30
"""With fewer examples, wide intervals get a warning."""
_EVENTS_NOTE = f"Wiped out are regions of {REGION} tokens, the middle is a third, and IoU is with the event before."
_PEAKS_NOTE = "Peaks are the device's, with weights and all answers that were decoded side by side."


def interval(figure: Figure, sign: str = "") -> str:
    """Return a figure in percent with its interval.

    Args:
        figure: the figure, a fraction.
        sign: `+` to show the sign of positive numbers.
    """
    # A value that rounds to zero is shown without a sign.
    return with_interval(figure.value, figure.low, figure.high, lambda end: f"{round(100 * end, 1) + 0.0:{sign}.1f}")


def _mean(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.means.get(name)


def _examples(row: Row) -> str:
    return str(row.examples) if row.examples == row.examples_of else f"{row.examples} of {row.examples_of}"


_FIGURES = [
    Column("score (95%)", lambda row: row.score, interval, "%"),
    Column("difference (95%)", lambda row: row.difference, lambda figure: interval(figure, "+"), "%", rank=2),
    Column("kept", _mean("keep"), percent, "of entries", rank=3),
    Column("of 16-bit", _mean("share"), percent, "full cache", rank=1),
    Column("computed", _mean("computed"), integer, "tokens", rank=2),
    Column("examples", _examples, rank=4),
    Column("allocated", _mean("kv_bytes"), megabytes, "MB", page_only=True),
    Column("tokens", _mean("tokens"), decimals(1), page_only=True),
    Column("finished", _mean("finished"), percent, page_only=True),
    Column("repetition", _mean("repetition"), percent, "4-grams", page_only=True),
    Column("prefill", _mean("prefill_seconds"), seconds, "s", page_only=True),
    Column("select", _mean("select_seconds"), seconds, "s", page_only=True),
    Column("decode", _mean("decode_seconds"), seconds, "s", page_only=True),
]
_EVENTS = [
    Column("tokens", _mean("tokens"), decimals(0), rank=5),
    Column("repetition", _mean("repetition"), percent, rank=3),
    Column("wiped out", _mean("wipeout"), percent),
    Column("middle kept", _mean("middle"), percent, rank=2),
    Column("IoU", _mean("iou"), percent, rank=1),
    Column("early, middle, late layers", lambda row: _by_stage(row) or None, rank=4),
]
_PEAKS = [
    Column("peak memory", _mean("peak_bytes"), lambda nbytes: f"{nbytes / 1e6:.0f} MB"),
    Column("side by side", _mean("batch"), decimals(1), rank=1),
]


def _by_stage(row: Row) -> str:
    shares = (row.means.get(f"iou_{stage}") for stage in ("early", "middle", "late"))
    return ", ".join(percent(share) for share in shares if share is not None)


def figures_table(rows: Sequence[Row]) -> Table:
    """Return scores, differences and costs, task by task."""
    return _by_task(rows, _FIGURES, _failures)


def events_table(rows: Sequence[Row]) -> Table:
    """Return the effects of compression while decoding on a text, for tasks whose recipes have such events."""
    tasks = {row.task for row in rows if row.means.get("wipeout") is not None}
    return _by_task([row for row in rows if row.task in tasks], _EVENTS)


def peaks_table(rows: Sequence[Row]) -> Table:
    """Return the peak memory, if the device reports it."""
    return _by_task([row for row in rows if row.means.get("peak_bytes") is not None], _PEAKS)


def trades_table(trades: Sequence[Trade]) -> Table:
    """Return the areas under methods' curves, and the share that can be dropped at each loss."""
    tolerances = sorted({reach.tolerance for trade in trades for reach in trade.reach})
    columns = [
        Column("area (95%)", lambda trade: trade.area, interval, "%"),
        Column("from", lambda trade: trade.smallest, percent, "of 16-bit", rank=len(tolerances) + 1),
        Column("budgets", lambda trade: trade.budgets, page_only=True),
        Column("examples", lambda trade: trade.examples, page_only=True),
    ]
    for rank, tolerance in enumerate(tolerances):
        columns.append(
            Column(
                f"can go, loss {tolerance:.0%}",
                lambda trade, at=tolerance: next((reach for reach in trade.reach if reach.tolerance == at), None),
                lambda reach: (">= " if reach.at_least else "") + interval(reach.removed),
                "%",
                rank=len(tolerances) - rank,
            )
        )
    table = Table("", columns, fold=True)
    for trade in trades:
        failed = f"failures, counted as not answered: {trade.failed}" if trade.failed else ""
        table.add(trade.method, trade, heading=trade.task, error=failed)
    return table


def _by_task(rows: Sequence[Row], columns: list[Column], error: Callable[[Row], str] = lambda row: "") -> Table:
    table = Table("", filled(columns, rows), fold=True)
    for task, group in groupby(rows, attrgetter("task")):
        of_task = list(group)
        heading = _heading(task, of_task)
        for row in of_task:
            table.add(row.recipe, row, heading=heading, error=error(row))
    return table


def _heading(task: str, rows: Sequence[Row]) -> str:
    cut = max(row.cut for row in rows)
    tasks = f", mean of {rows[0].tasks_of} tasks" if rows[0].tasks_of > 1 else ""
    return task + tasks + (f", {cut} contexts cut to what the model takes" if cut else "")


def _failures(row: Row) -> str:
    parts = [f"a score on {row.tasks} of {row.tasks_of} tasks"] if row.tasks < row.tasks_of else []
    parts += [f"failed on {row.failed} of {row.examples}: {row.error or ''}"] if row.failed else []
    return "\n".join(parts)


def baseline_note(summary: Summary) -> str:
    """Return a note that names the baseline, and warns of too few examples."""
    few = min((row.examples for row in summary.rows), default=_FEW)
    wide = f" Intervals over {counted(few)} are wide: let --limit take more." if few < _FEW else ""
    return f"Differences are to {summary.baseline}.{wide}"


def terminal_tables(summary: Summary) -> list[tuple[Table, str]]:
    """Return the tables of a summary that have lines, each with the sentence that follows it."""
    rows = [*summary.rows, *summary.averages]
    tables = [
        (figures_table(rows), baseline_note(summary)),
        (events_table(rows), _EVENTS_NOTE),
        (peaks_table(rows), _PEAKS_NOTE),
        (trades_table(summary.trades), ""),
    ]
    return [(table, note) for table, note in tables if table.lines]


def render(model: str, configuration: Mapping[str, Any], summary: Summary) -> str:
    """Return the page of a sweep.

    Args:
        model: the model's name.
        configuration: the settings that all records share, by plain names.
        summary: the figures.
    """
    # Averages over groups of tasks come first.
    rows = [*summary.averages, *summary.rows]
    methods = [method for method in dict.fromkeys(row.method for row in rows) if method != FULL]
    tasks = [(task, _task(task, summary, methods)) for task in dict.fromkeys(row.task for row in rows)]
    recipes = {row.recipe for row in summary.rows if row.recipe != FULL}
    count = len({row.task for row in summary.rows})
    maps: dict[str, list[dict[str, Any]]] = {}
    for needle in sorted(summary.needles, key=lambda needle: needle.recipe != FULL):
        maps.setdefault(needle.task, []).append(_map(needle))
    needles = [
        (task, [{"kind": "maps", "maps": maps[task]}])
        for task in dict.fromkeys(needle.task for needle in summary.needles)
    ]
    sections = [choice("task", "Task", tasks)] if tasks else []
    if needles:
        note = "Mean score in percent of needles at this depth of texts of so many tokens: the stronger, the better."
        sections.append(
            {**choice("needle-task", "Task", needles), "title": "Needles by depth and length", "note": note}
        )
    return page(
        "keepset results",
        model,
        sections,
        conclusion=summary.conclusion,
        lead=f"{len(recipes)} recipe{'' if len(recipes) == 1 else 's'} on {count} task{'' if count == 1 else 's'}. "
        "Every score has its interval of 95 % over examples.",
        facts=[
            ("Answers judged", integer(sum(row.examples for row in summary.rows))),
            ("Compared with", summary.baseline),
        ],
        settings=[
            (f"{name[:1].upper()}{name[1:]}", None if value is None else str(value))
            for name, value in configuration.items()
        ],
    )


def _task(task: str, summary: Summary, methods: Sequence[str]) -> list[Section]:
    rows = [row for row in (*summary.averages, *summary.rows) if row.task == task]
    charts = [(name, [_chart(rows, methods, key, title)]) for name, key, title in (
        ("KV cache bytes", "share", "KV cache bytes, share of a full 16-bit cache"),
        ("Entries", "keep", "Entries kept, share of all"),
    )]  # fmt: skip
    same = " with the same budget" if summary.baseline in methods else ""
    cut = max(row.cut for row in rows)
    note = (
        (f"Of {integer(cut)} examples the context was cut in its middle, to what the model takes. " if cut else "")
        + f"Differences are to {summary.baseline}{same}, on the examples that both were run on. Examples on which a "
        "recipe failed count as not answered; bytes and seconds are means over the others. A click on a column's name "
        "sorts."
    )
    sections = [
        {**choice("axis", "Horizontal axis", charts, radio=True), "title": "Accuracy against what is kept"},
        figures_table(rows).section("Figures", note=note),
    ]
    for table, title, name, words in (
        (events_table(rows), "While decoding", "events", _EVENTS_NOTE),
        (peaks_table(rows), "Peak memory", "peaks", _PEAKS_NOTE),
        (
            trades_table([trade for trade in summary.trades if trade.task == task]),
            "Over all budgets",
            "trades",
            _TRADES,
        ),
    ):
        if table.lines:
            sections.append(table.section(title, name, words))
    return sections


_TRADES = (
    "The area under accuracy over the share of a full 16-bit cache's bytes, from the smallest budget on, as a mean "
    "score; areas compare if they begin at the same share. What can go is the largest share of bytes whose removal "
    "costs at most so much of the full cache's score, linear between budgets, >= if no smaller budget was tried; tasks "
    "on which the full cache scores nothing are left out."
)


def _chart(rows: Sequence[Row], methods: Sequence[str], axis: str, title: str) -> Section:
    scored = [row for row in rows if row.score is not None and row.means.get(axis) is not None]
    lines = []
    for at, method in enumerate(methods):
        points = sorted(_point(row, axis) for row in scored if row.method == method)
        lines.append(plot.line(method, points, at))
    full = [row for row in scored if row.recipe == FULL]
    points = [_point(row, axis) for row in full]
    lines.append(plot.line(FULL, points, "--muted", mode="markers", symbol="star", size=12))
    levels = [row.score.value for row in full if row.score is not None]
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "stroke": "--muted", "line": {"dash": "dash"}}
    level = [{**across, "y0": y, "y1": y} for y in levels]
    shares = {"tickformat": ".0%", "rangemode": "tozero", "zeroline": False}
    chart = plot.plot(
        "plot", lines, plot.axis(title, **shares), plot.axis("Score", **shares), height="430px", shapes=level
    )
    note = "The star and the dashed line are the full cache's."
    if any(row.failed for row in scored):
        note += " Hollow markers: the recipe failed on some of the examples, which count as not answered."
    return plot.plots("", [chart], [plot.entry(method, at) for at, method in enumerate(methods)], note)


def _point(row: Row, axis: str) -> plot.Point:
    assert row.score is not None
    failed = f", of which {row.failed} failed" if row.failed else ""
    hover = (
        f"{plot.wrapped(row.recipe)}<br>{interval(row.score)} %<br>{percent(row.means['share'] or 0)} of a full 16-bit "
        f"cache, {percent(row.means['keep'] or 0)} of the entries<br>{_examples(row)} examples{failed}"
    )
    x, score = row.means[axis] or 0.0, row.score
    return plot.Point(x, score.value, hover, score.low, score.high, is_hollow=bool(row.failed))


def _map(needles: NeedleMap) -> dict[str, Any]:
    """Return a needle map as a table of shaded cells, without the depths at which there are no examples."""
    lines = []
    for part, (scores, counts) in enumerate(zip(needles.scores, needles.examples, strict=True)):
        cells = [
            ("" if score is None else f"{100 * score:.0f}", score, f"{count} examples")
            for score, count in zip(scores, counts, strict=True)
        ]
        if any(counts):
            lines.append([f"{10 * part} to {10 * part + 10} %", *cells])
    return {"title": needles.recipe, "head": ["depth", *map(integer, needles.lengths)], "lines": lines}
