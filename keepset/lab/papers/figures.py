"""Figures of an entry from the cells of a sweep, and its table beside the paper's figures."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from keepset.lab.analysis.intervals import Figure, of_average, of_mean, of_score
from keepset.lab.analysis.rows import by_example
from keepset.lab.analysis.summary import TOLERANCES, groups_of, split, summarize
from keepset.lab.papers.entry import AREA, SCORE, SECONDS, FigureKey, MeasuredFigure, Sweep, SweepLine, removed_at
from keepset.lab.record import Record
from keepset.lab.report.table import Column, Table, with_interval

CURVES = (AREA, *map(removed_at, TOLERANCES))
"""Metrics whose figures cover all tasks and budgets together."""
FRACTIONS = (SCORE, "keep", "finished", "repetition", "wipeout", "middle", *CURVES)
"""Metrics from 0 to 1, which are shown in percent."""


def figures_of(sweep: Sweep, cells: Sequence[Record], files: Mapping[str, Path]) -> list[MeasuredFigure]:
    """Return the figures of a sweep: for every task, method, budget and metric, then for all tasks together.

    An example on which a recipe failed counts as not answered in a score, and is left out of a cost. Each value of the
    facts `sweep.by` also gets figures, if examples have the fact.

    Args:
        sweep: the paper's sweep.
        cells: its records.
        files: the model's files; see `recipe_of`.
    """
    lines, rows = sweep.lines(files), list[MeasuredFigure]()
    if sweep.solved_by:
        cells, rows = _told_apart(sweep, cells, lines)
    parts = [part for fact in sweep.by if any(fact in cell.facts for cell in cells) for part in split(cells, fact)]
    by_place: dict[tuple[str, str], list[Record]] = {}
    for cell in [*cells, *parts]:
        by_place.setdefault((cell.task, cell.recipe), []).append(cell)
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    for task in dict.fromkeys(task for task, _ in by_place):
        for metric in sweep.metrics:
            of_metric = [
                _figure_of(FigureKey(task + sweep.suffix, line.method, line.keep, metric), records)
                for line in lines
                if metric not in CURVES and (records := by_place.get((task, line.candidate.text)))
            ]
            rows += [*of_metric, *_differences(sweep, of_metric)]
    if not sweep.average:
        return rows
    together = sweep.average + sweep.suffix
    by_line: dict[FigureKey, list[MeasuredFigure]] = {}
    for row in rows:
        if row.key.task.removesuffix(sweep.suffix) in tasks:
            by_line.setdefault(row.key._replace(task=""), []).append(row)
    averages = [_average(together, line_rows, len(tasks)) for line_rows in by_line.values()]
    return [*rows, *averages, *_over_budgets(together, sweep, cells, lines)]


def _told_apart(
    sweep: Sweep, cells: Sequence[Record], lines: Sequence[SweepLine]
) -> tuple[list[Record], list[MeasuredFigure]]:
    """Return the cells of examples that one method solves and another misses, and the counts of such examples.

    Args:
        sweep: names the two methods.
        cells: all cells.
        lines: the methods under their budgets.
    """
    kept: list[Record] = []
    rows = []
    texts = {(line.method, line.keep): line.candidate.text for line in lines}
    for keep in dict.fromkeys(line.keep for line in lines if line.method == sweep.solved_by):
        solved, missed = (
            {(cell.task, cell.example): cell.score for cell in cells if cell.recipe == texts[name, keep]}
            for name in (sweep.solved_by, sweep.missed_by)
        )
        separating = {example for example in solved if solved[example] == 1 and missed.get(example, 1) < 1}
        recipes = {line.candidate.text for line in lines if line.keep == keep}
        kept += [cell for cell in cells if cell.recipe in recipes and (cell.task, cell.example) in separating]
        for task in dict.fromkeys(cell.task for cell in cells):
            examples = sum(of == task for of, _ in solved)
            count = Figure(float(sum(of == task for of, _ in separating)))
            name = f"{sweep.solved_by} right, {sweep.missed_by} wrong"
            rows.append(MeasuredFigure(FigureKey(task + sweep.suffix, name, keep, "examples"), count, examples))
    return kept, rows


def _differences(sweep: Sweep, rows: Sequence[MeasuredFigure]) -> Iterator[MeasuredFigure]:
    figures = {(row.key.method, row.key.keep): row for row in rows if row.figure is not None}
    for name, (minuend, subtrahend) in sweep.differences.items():
        for (method, keep), row in figures.items():
            second = figures.get((subtrahend, keep))
            if method == minuend and row.figure is not None and second is not None and second.figure is not None:
                value = Figure(row.figure.value - second.figure.value)
                yield MeasuredFigure(row.key._replace(method=name), value, min(row.examples, second.examples))


def averages_over_models(
    published: Mapping[FigureKey, float], models: Sequence[Sequence[MeasuredFigure]]
) -> list[MeasuredFigure]:
    """Return the mean over models, and over the modes of a task, for each of a paper's means.

    Args:
        published: the paper's means.
        models: the figures of each model; a mean is None if a model lacks one.
    """
    rows = []
    for key in published:
        by_model = [
            [row for row in rows if row.key._replace(task=row.key.task.partition(", ")[0]) == key] for rows in models
        ]
        figures = [row.figure.value for model_rows in by_model for row in model_rows if row.figure is not None]
        found = [row for model_rows in by_model for row in model_rows]
        whole = all(by_model) and len(figures) == len(found)
        figure = Figure(fmean(figures)) if whole else None
        counts = sum(row.examples for row in found), sum(row.failed for row in found)
        rows.append(MeasuredFigure(key, figure, *counts))
    return rows


def _figure_of(key: FigureKey, cells: Sequence[Record]) -> MeasuredFigure:
    errors = [cell.error for cell in cells if cell.error is not None]
    figure = None
    if len(errors) < len(cells):
        values = by_example((cell.example, value) for cell in cells if (value := _value(cell, key.metric)) is not None)
        figure = of_score(values) if key.metric == SCORE else of_mean(values)
    examples = len({cell.example for cell in cells})
    return MeasuredFigure(key, figure, examples, len(errors), errors[0] if errors else None)


def _value(cell: Record, metric: str) -> float | None:
    if metric == SCORE:
        return cell.score
    if cell.error is not None:
        return None
    if metric == SECONDS:
        return sum(cell.figures[name] for name in ("prefill_seconds", "select_seconds", "decode_seconds"))
    return cell.figures.get(metric)


def _average(together: str, rows: Sequence[MeasuredFigure], tasks: int) -> MeasuredFigure:
    """Return the mean over tasks, each with the same weight; without a figure if a task has none."""
    figures = [row.figure for row in rows if row.figure is not None]
    figure = of_average(figures) if len(figures) == tasks else None
    error = next((row.error for row in rows if row.error is not None), None)
    counts = sum(row.examples for row in rows), sum(row.failed for row in rows)
    return MeasuredFigure(rows[0].key._replace(task=together), figure, *counts, error)


def _over_budgets(
    together: str, sweep: Sweep, cells: Sequence[Record], lines: Sequence[SweepLine]
) -> Iterator[MeasuredFigure]:
    """Yield figures of curves over all budgets: of a benchmark's tasks at one length, or of a single task.

    Args:
        together: the table's name for all tasks.
        sweep: the paper's sweep.
        cells: its records.
        lines: the methods under their budgets.
    """
    metrics = [metric for metric in sweep.metrics if metric in CURVES]
    if not metrics:
        return
    tasks = {cell.task for cell in cells}
    whole = tasks if len(tasks) == 1 else {group for task in tasks for group in groups_of(task)[-1:]}
    trades = {trade.method: trade for trade in summarize(cells, axis="keep").trades if trade.task in whole}
    methods = {line.candidate.method: line.method for line in lines}
    for metric in metrics:
        for name, method in methods.items():
            if name in trades:
                trade = trades[name]
                figures = {AREA: trade.area} | {removed_at(reach.tolerance): reach.removed for reach in trade.reach}
                key = FigureKey(together, method, None, metric)
                yield MeasuredFigure(key, figures.get(metric), trade.examples, trade.failed)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table, with a heading for every task and metric; the rows are those of `keepset reproduce --json`."""
    columns = [
        Column("keep", lambda row: row["keep"]),
        Column("paper", lambda row: _number(row["paper"], row["metric"])),
        Column("measured (95 %)", _measured),
        Column("examples", lambda row: row["examples"], rank=1),
    ]
    table = Table("", columns, fold=True)
    for row in rows:
        error = f"failed on {row['failed']} of {row['examples']}: {row['error']}" if row["failed"] else ""
        table.add(row["method"], row, heading=f"{row['task']}, {row['metric']}", error=error)
    return table


def _measured(row: Mapping[str, Any]) -> str:
    if (figure := row["figure"]) is None:
        return ""
    return with_interval(figure["value"], figure["low"], figure["high"], lambda value: _number(value, row["metric"]))


def _number(value: float | None, metric: str) -> str:
    if value is None:
        return ""
    if metric.endswith("_bytes"):
        return f"{value / 1e6:.1f} MB"
    # A value that rounds to zero is shown without a sign.
    return f"{round(100 * value, 1) + 0.0:.1f}" if metric in FRACTIONS else f"{value:,.4g}"
