"""From a sweep's cells to the figures of a table, with intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from keepset.bench.analysis import intervals
from keepset.bench.analysis.rows import Figure, by_example
from keepset.bench.cell import Cell
from keepset.bench.papers.entry import SCORE, Key, Measured, Sweep

FRACTIONS = (SCORE, "keep", "finished", "repetition")
"""Metrics from 0 to 1, which papers give in percent."""


def measured(sweep: Sweep, cells: Sequence[Cell], files: Mapping[str, Path]) -> list[Measured]:
    """A figure for every task, method, budget and metric of which there is a cell.

    An example on which a recipe failed counts as not answered in a score, and not at all in a cost.
    """
    by_place: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        by_place.setdefault((cell.task, cell.recipe), []).append(cell)
    rows = []
    for task in dict.fromkeys(cell.task for cell in cells):
        for metric in sweep.metrics:
            for line in sweep.lines(files):
                if there := by_place.get((task, line.candidate.text)):
                    rows.append(_measured(Key(task, line.method, line.keep, metric), there))
    return rows


def _measured(key: Key, cells: Sequence[Cell]) -> Measured:
    errors = [cell.error for cell in cells if cell.outcome is None]
    figure = None
    if len(errors) < len(cells):
        values = by_example((cell.example, value) for cell in cells if (value := _value(cell, key.metric)) is not None)
        interval = intervals.of_score(values) if key.metric == SCORE else intervals.of_mean(values)
        figure = Figure.of(fmean(values), interval)
    examples = len({cell.example for cell in cells})
    return Measured(key, figure, examples, len(errors), errors[0] if errors else None)


def _value(cell: Cell, metric: str) -> float | None:
    if metric == SCORE:
        return cell.score
    return None if cell.outcome is None else getattr(cell.outcome, metric)
