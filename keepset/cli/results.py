"""`keepset results`: what the file of a sweep comes to, as a table, a page, CSV, LaTeX or JSON."""

from __future__ import annotations

import json
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keepset.errors import KeepsetError

if TYPE_CHECKING:
    from rich.text import Text

    from keepset.bench.analysis.rows import Figure, TableRow
    from keepset.bench.analysis.summary import Summary, Trade


def results(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `keepset eval` wrote, finished or not.")],
    baseline: Annotated[
        str | None,
        typer.Option(
            help="What to compare with: a recipe, or a method for its recipe with the same budget; the full cache if "
            "not given."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write all rows to this file.")] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the scores as LaTeX tables to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what recipes are worth on benchmarks: scores with intervals, differences, bytes, areas under curves.

    Differences are over the examples that both recipes were run on. Intervals are of 95 %, over examples.
    """
    from keepset.bench.analysis.summary import summarise
    from keepset.bench.sweep.store import Store
    from keepset.cli.compare import check_writable
    from keepset.cli.console import err, printable

    wanted = [path for path in (html, csv, latex) if path is not None]
    if len({path.resolve() for path in (file, *wanted)}) <= len(wanted):
        raise KeepsetError("--html, --csv, --latex and the sweep's file are the same in part: name different files.")
    for path in wanted:
        check_writable(path)
    with Store.open(file) as store:
        cells, model, configuration = store.cells(), store.model, store.configuration
    if not cells:
        raise KeepsetError(f"{str(file)!r} has no figures yet: let `keepset eval` make some first.")
    summary = summarise(cells, baseline)
    if as_json:
        print(json.dumps(summary.to_json(), indent=2))
    else:
        print_summary(summary)
    if wanted:
        from keepset.bench.analysis.export import to_csv, to_latex
        from keepset.bench.report.eval import render
        from keepset.bench.report.page import write

        if csv is not None:
            write(csv, to_csv(summary))
        if latex is not None:
            write(latex, to_latex(summary))
        if html is not None:
            write(html, render(model, configuration, summary.to_json()))
        said = ", ".join(str(path) for path in wanted)
        err.print(f"written: {printable(said)}", markup=False, highlight=False, soft_wrap=True)


def print_summary(summary: Summary) -> None:
    """The figures as tables; averages come last, where they are seen."""
    from rich.table import Table
    from rich.text import Text

    from keepset.cli.console import out, printable

    def table(*titles: str) -> Table:
        made = Table(box=None, pad_edge=False, header_style="bold")
        made.add_column("", overflow="fold")
        for title in titles:
            made.add_column(title, justify="right", overflow="fold")
        return made

    rows = table("score (95 %)", "difference (95 %)", "kept", "bytes", "examples")
    for task, group in groupby((*summary.rows, *summary.averages), attrgetter("task")):
        here = list(group)
        cut = max(row.cut for row in here)
        said = f", {cut} contexts cut to what the model takes" if cut else ""
        rows.add_row(Text.assemble((printable(task), "bold"), said))
        for row in here:
            rows.add_row(_named(row), *_cells(row))
    out.print(rows)
    out.print(f"Differences are to {printable(summary.baseline)}.", markup=False, highlight=False)
    if not summary.trades:
        return
    trades = table("area (95 %)", "from", *(f"can go, loss {each:.0%}" for each in _tolerances(summary)))
    for task, found in groupby(summary.trades, attrgetter("task")):
        trades.add_row(Text(printable(task), "bold"))
        for trade in found:
            name = Text(f"  {printable(trade.method)}")
            if trade.failed:
                name.append(f"\n  failures, counted as not answered: {trade.failed}", "red")
            trades.add_row(name, *_over_budgets(trade, _tolerances(summary)))
    out.print()
    out.print(trades)


def _tolerances(summary: Summary) -> list[float]:
    return sorted({each.tolerance for trade in summary.trades for each in trade.reach})


def _named(row: TableRow) -> Text:
    from rich.text import Text

    from keepset.cli.console import printable

    name = Text(f"  {printable(row.recipe)}")
    if row.tasks < row.tasks_of:
        name.append(f"\n  a score on {row.tasks} of {row.tasks_of} tasks", "red")
    if row.failed:
        name.append(f"\n  failed on {row.failed} of {row.examples}: {printable(row.error or '')}", "red")
    return name


def _cells(row: TableRow) -> list[str]:
    examples = str(row.examples) if row.examples == row.examples_of else f"{row.examples} of {row.examples_of}"
    if row.score is None:
        return ["", "", "", "", examples]
    shares = ("" if share is None else f"{share:.1%}" for share in (row.keep, row.share))
    return [_shown(row.score), _shown(row.difference, sign="+"), *shares, examples]


def _over_budgets(trade: Trade, tolerances: list[float]) -> list[str]:
    reach = {each.tolerance: each for each in trade.reach}
    cells = [_shown(trade.area), f"{trade.smallest:.1%}"]
    for tolerance in tolerances:
        found = reach.get(tolerance)
        cells.append("" if found is None else (">= " if found.at_least else "") + _shown(found.removed))
    return cells


def _shown(figure: Figure | None, sign: str = "") -> str:
    """In percent, with its interval, which may go on a line of its own."""
    if figure is None:
        return ""
    # What rounds to zero has no sign of its own.
    ends = (figure.value, figure.low, figure.high)
    value, low, high = ("" if end is None else f"{round(100 * end, 1) + 0.0:{sign}.1f}" for end in ends)
    return f"{value} ({low}..{high})" if low else value
