"""`keepset results`: the figures of a sweep's file as tables, a page, CSV or JSON."""

from __future__ import annotations

import csv as csv_files
import io
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from keepset.errors import KeepsetError
from keepset.lab.cli.checks import check_writable
from keepset.lab.cli.console import note, output, say, show, show_table, write
from keepset.lab.cli.options import Html, Json

if TYPE_CHECKING:
    from keepset.lab.analysis.rows import Row
    from keepset.lab.analysis.summary import Summary

_INTERVALS = ("score", "difference")
# Spreadsheets take a text that begins with one of these for a formula.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def results(
    file: Annotated[Path, Argument(metavar="FILE", help="What `keepset eval` wrote, finished or not.")],
    baseline: Annotated[
        str | None,
        Option(
            help="What to compare with: a recipe, or a method (its recipe of the same budget). [default: the full "
            "cache]"
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
    json_file: Json = None,
) -> None:
    """Show what keepset eval has measured.

    The tables have scores, differences, bytes and areas under curves. Differences are over the examples that both
    recipes were run on. Intervals are 95 % intervals over examples.
    """
    from keepset.lab.analysis.summary import split, summarize
    from keepset.lab.report.results import render
    from keepset.lab.sweep.store import Store

    paths = [path for path in (html, csv) if path is not None]
    if len({path.resolve() for path in (file, *paths)}) <= len(paths):
        raise KeepsetError("Two of --html, --csv and the sweep's file are the same: name different files.")
    check_writable(json_file, *paths)
    with Store.open(file) as store:
        cells, model, configuration = store.cells(), store.model, store.configuration
    if not cells:
        raise KeepsetError(f"{str(file)!r} has no figures yet: let `keepset eval` make some first.")
    summary = summarize(cells if by is None else split(cells, by), baseline)
    output(summary.to_json(), json_file, lambda: print_summary(summary))
    write(csv, lambda: to_csv(summary), described=None)
    write(html, lambda: render(model, configuration, summary), described=None)
    if paths:
        note(f"written: {', '.join(map(str, paths))}")


def print_summary(summary: Summary) -> None:
    """Print the figures as tables, each with the sentence that explains it, and the conclusion."""
    from keepset.lab.report.results import terminal_tables

    for number, (table, sentence) in enumerate(terminal_tables(summary)):
        if number:
            show()
        show_table(table)
        if sentence:
            say(sentence)
    say(summary.conclusion)


def to_csv(summary: Summary) -> str:
    """Return rows and averages as CSV; a text that a spreadsheet would take for a formula begins with `'`."""
    out = io.StringIO()
    rows = [_flat(row) for row in (*summary.rows, *summary.averages)]
    writer = csv_files.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    """Return a row by names of columns; an interval has a column for each of its ends."""
    flat: dict[str, Any] = {}
    for name, value in row.to_json().items():
        if name in _INTERVALS:
            ends = value or {"value": "", "low": "", "high": ""}
            flat |= {name: ends["value"], f"{name}_low": ends["low"], f"{name}_high": ends["high"]}
        else:
            # Spreadsheets also take some full-width forms for formulas.
            is_risky = isinstance(value, str) and unicodedata.normalize("NFKC", value[:1]).startswith(_FORMULAS)
            flat[name] = f"'{value}" if is_risky else value
    return flat
