"""`keepset results`: what the file of a sweep comes to, as a table, a page, CSV, LaTeX or JSON."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from keepset.cli.checks import check_writable
from keepset.cli.console import cell, note, output, say, show, table, write
from keepset.cli.options import Html, Json
from keepset.errors import KeepsetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from keepset.bench.analysis.rows import Figure, TableRow
    from keepset.bench.analysis.summary import Summary, Trade


_FEW = 30
"""Examples below which intervals are worth a warning."""


def results(
    file: Annotated[Path, Argument(metavar="FILE", help="What `keepset eval` wrote, finished or not.")],
    baseline: Annotated[
        str | None,
        Option(
            help="What to compare with: a recipe, or a method for its recipe with the same budget; the full cache if "
            "not given."
        ),
    ] = None,
    by: Annotated[
        str | None,
        Option(
            help="A fact of the examples, such as subject, level or depth: each of its values gets its own figures."
        ),
    ] = None,
    html: Html = None,
    csv: Annotated[Path | None, Option(help="Write all rows to this file.")] = None,
    latex: Annotated[Path | None, Option(help="Write the scores as LaTeX tables to this file.")] = None,
    json_file: Json = None,
) -> None:
    """Show what keepset eval has measured.

    Scores with intervals, differences, bytes, areas under curves. Differences are over the examples that both recipes
    were run on. Intervals are of 95 %, over examples.
    """
    from keepset.bench.analysis.export import to_csv, to_latex
    from keepset.bench.analysis.summary import split, summarise
    from keepset.bench.report.eval import render
    from keepset.bench.sweep.store import Store

    paths = [path for path in (html, csv, latex) if path is not None]
    if len({path.resolve() for path in (file, *paths)}) <= len(paths):
        raise KeepsetError("--html, --csv, --latex and the sweep's file are the same in part: name different files.")
    check_writable(json_file, *paths)
    with Store.open(file) as store:
        cells, model, configuration = store.cells(), store.model, store.configuration
    if not cells:
        raise KeepsetError(f"{str(file)!r} has no figures yet: let `keepset eval` make some first.")
    summary = summarise(cells if by is None else split(cells, by), baseline)
    output(summary.to_json(), json_file, lambda: print_summary(summary))
    write(csv, lambda: to_csv(summary), described=None)
    write(latex, lambda: to_latex(summary), described=None)
    write(html, lambda: render(model, configuration, summary.to_json()), described=None)
    if paths:
        note(f"written: {', '.join(map(str, paths))}")


def print_summary(summary: Summary) -> None:
    """The figures as tables; averages come last, where they are seen."""
    from rich.text import Text

    figures = ("score (95%)", "difference (95%)", "kept", "bytes", "examples")
    rows = table("", numbers=figures, optional=("examples", "kept", "difference (95%)", "bytes"), fold=True)
    for task, group in groupby((*summary.rows, *summary.averages), attrgetter("task")):
        of_task = list(group)
        cut = max(row.cut for row in of_task)
        tasks = f", mean of {of_task[0].tasks_of} tasks" if of_task[0].tasks_of > 1 else ""
        warning = f", {cut} contexts cut to what the model takes" if cut else ""
        rows.add_row(Text.assemble(cell(task, style="bold"), tasks, warning))
        for row in of_task:
            rows.add_row(_named(row), *_cells(row))
    show(rows)
    few = min((row.examples for row in summary.rows), default=_FEW)
    counted = f"{few} example{'s' if few > 1 else ''}"
    wide = f" Intervals over {counted} are wide: let --limit take more." if few < _FEW else ""
    say(f"Differences are to {summary.baseline}.{wide}")
    _print_events([*summary.rows, *summary.averages])
    _print_peaks([*summary.rows, *summary.averages])
    if not summary.trades:
        return
    tolerances = sorted({each.tolerance for trade in summary.trades for each in trade.reach})
    losses = [f"can go, loss {tolerance:.0%}" for tolerance in tolerances]
    trades = table("", numbers=("area (95%)", "from", *losses), optional=("from", *losses), fold=True)
    for task, of_recipes in groupby(summary.trades, attrgetter("task")):
        trades.add_row(cell(task, style="bold"))
        for trade in of_recipes:
            failed = f"  failures, counted as not answered: {trade.failed}" if trade.failed else None
            trades.add_row(cell(f"  {trade.method}", failed), *_over_budgets(trade, tolerances))
    show()
    show(trades)


def _print_events(rows: Sequence[TableRow]) -> None:
    """What compression while decoding does to a text: of tasks whose recipes have such events."""
    from keepset.bench.analysis.diagnostics import REGION

    tasks = {row.task for row in rows if row.wipeout is not None}
    if not tasks:
        return
    columns = ("tokens", "repetition", "wiped out", "middle kept", "IoU", "early, middle, late layers")
    optional = ("tokens", "early, middle, late layers", "repetition", "middle kept", "IoU")
    events = table("", numbers=columns, optional=optional, fold=True)
    for task, group in groupby((row for row in rows if row.task in tasks), attrgetter("task")):
        events.add_row(cell(task, style="bold"))
        for row in group:
            depths = (row.iou_early, row.iou_middle, row.iou_late)
            shares = (row.repetition, row.wipeout, row.middle, row.iou)
            tokens = "" if row.tokens is None else f"{row.tokens:.0f}"
            layers = ", ".join(f"{share:.1%}" for share in depths if share is not None)
            events.add_row(cell(f"  {row.recipe}"), tokens, *map(_share, shares), layers)
    show()
    show(events)
    say(f"Wiped out are regions of {REGION} tokens, the middle is a third, and IoU is with the event before.")


def _print_peaks(rows: Sequence[TableRow]) -> None:
    """The most memory in use, where the device tells it."""
    measured = [(row, row.peak_bytes, row.batch) for row in rows if row.peak_bytes is not None]
    if not measured:
        return
    peaks = table("", numbers=("peak memory", "side by side"), optional=("side by side",), fold=True)
    for task, group in groupby(measured, lambda each: each[0].task):
        peaks.add_row(cell(task, style="bold"))
        for row, peak, batch in group:
            peaks.add_row(cell(f"  {row.recipe}"), f"{peak / 1e6:.0f} MB", "" if batch is None else f"{batch:.1f}")
    show()
    show(peaks)
    say("Peaks are the device's, with weights and all answers that were decoded side by side.")


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _named(row: TableRow) -> Text:
    errors = [f"  a score on {row.tasks} of {row.tasks_of} tasks"] if row.tasks < row.tasks_of else []
    errors += [f"  failed on {row.failed} of {row.examples}: {row.error or ''}"] if row.failed else []
    return cell(f"  {row.recipe}", "\n".join(errors) or None)


def _cells(row: TableRow) -> list[str]:
    examples = str(row.examples) if row.examples == row.examples_of else f"{row.examples} of {row.examples_of}"
    if row.score is None:
        return ["", "", "", "", examples]
    return [_shown(row.score), _shown(row.difference, sign="+"), _share(row.keep), _share(row.share), examples]


def _over_budgets(trade: Trade, tolerances: list[float]) -> list[str]:
    reach = {each.tolerance: each for each in trade.reach}
    cells = [_shown(trade.area), f"{trade.smallest:.1%}"]
    for tolerance in tolerances:
        at = reach.get(tolerance)
        cells.append("" if at is None else (">= " if at.at_least else "") + _shown(at.removed))
    return cells


def _shown(figure: Figure | None, sign: str = "") -> str:
    """In percent, with its interval, which may go on a line of its own."""
    if figure is None:
        return ""
    # What rounds to zero has no sign of its own.
    ends = (figure.value, figure.low, figure.high)
    value, low, high = ("" if end is None else f"{round(100 * end, 1) + 0.0:{sign}.1f}" for end in ends)
    return f"{value} ({low}..{high})" if low else value
