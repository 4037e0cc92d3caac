"""A summary as CSV and as LaTeX."""

import csv
import io
import unicodedata
from collections.abc import Iterable
from typing import Any

from keepset.bench.analysis.intervals import Figure
from keepset.bench.analysis.rows import Row
from keepset.bench.analysis.summary import Summary
from keepset.bench.record import FULL, largest_first

_INTERVALS = ("score", "difference")
# Spreadsheets take a text that begins with one of these for a formula.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
_LATEX = {
    **{character: f"\\{character}" for character in "{}$&#%_"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def to_csv(summary: Summary) -> str:
    """Return rows and averages as CSV; a text that a spreadsheet would take for a formula begins with `'`."""
    out = io.StringIO()
    rows = [_flat(row) for row in (*summary.rows, *summary.averages)]
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
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


def to_latex(summary: Summary) -> str:
    """Return a table of scores by method and budget for the `booktabs` package.

    Scores are percentages with their intervals. A dagger marks a recipe that failed on some of the examples, a fraction
    a recipe that was run on only some of them.
    """
    rows = [*summary.rows, *summary.averages]
    budgets = sorted({row.requested for row in rows if row.recipe != FULL}, key=largest_first)
    head = ["method", *("own budget" if each is None else each.replace("=", " ") for each in budgets)]
    lines = [rf"\begin{{tabular}}{{l{'r' * len(budgets)}}}", r"\toprule", _line(head)]
    for task in dict.fromkeys(row.task for row in rows):
        here = [row for row in rows if row.task == task]
        full = "".join(f", {FULL} {_score(row)}" for row in here if row.recipe == FULL)
        examples = max(row.examples_of for row in here)
        title = rf"\textit{{{escape(task)}}}, {examples} example{'' if examples == 1 else 's'}{full}"
        lines += [r"\midrule", rf"\multicolumn{{{len(head)}}}{{l}}{{{title}}} \\"]
        for method in dict.fromkeys(row.method for row in here if row.recipe != FULL):
            scores = {row.requested: _score(row) for row in here if row.method == method}
            lines.append(_line([rf"\texttt{{{escape(method)}}}", *(scores.get(each, "--") for each in budgets)]))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _score(row: Row) -> str:
    if row.score is None:
        return "failed" if row.tasks_of == 1 else f"{row.tasks} of {row.tasks_of} tasks"
    marks = r"\dagger" if row.failed else ""
    if row.examples < row.examples_of:
        marks += rf"\,{row.examples}/{row.examples_of}"
    return _percent(row.score) + (f"$^{{{marks}}}$" if marks else "")


def _line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _percent(figure: Figure) -> str:
    if figure.low is None or figure.high is None:
        return f"{100 * figure.value:.1f}"
    return rf"{100 * figure.value:.1f} {{\scriptsize [{100 * figure.low:.1f}, {100 * figure.high:.1f}]}}"


def escape(text: str) -> str:
    """Return a text escaped for LaTeX, on one line, without control characters."""
    return "".join(_LATEX.get(character, character) for character in text if character.isprintable())
