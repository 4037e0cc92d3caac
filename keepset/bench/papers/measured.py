"""From a sweep's cells to the figures of a table, with intervals."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from keepset.bench.analysis import intervals
from keepset.bench.analysis.intervals import Interval
from keepset.bench.analysis.rows import Figure, by_example
from keepset.bench.analysis.summary import groups, split
from keepset.bench.cell import Cell
from keepset.bench.papers.entry import SCORE, SECONDS, Key, Line, Measured, Sweep

FRACTIONS = (SCORE, "keep", "finished", "repetition", "wipeout", "middle")
"""Metrics from 0 to 1, which papers give in percent."""


def measured(sweep: Sweep, cells: Sequence[Cell], files: Mapping[str, Path]) -> list[Measured]:
    """A figure for every task, method, budget and metric of which there is a cell; then averages of groups of tasks.

    An example on which a recipe failed counts as not answered in a score, and not at all in a cost.
    """
    lines = sweep.lines(files)
    parts = [part for fact in sweep.by if any(fact in cell.facts for cell in cells) for part in split(cells, fact)]
    by_place: dict[tuple[str, str], list[Cell]] = {}
    for cell in [*cells, *parts]:
        by_place.setdefault((cell.task, cell.recipe), []).append(cell)
    figures = {
        key: _measured(key, by_place[task, line.candidate.text])
        for task in dict.fromkeys(task for task, _ in by_place)
        for key, line in _keys(sweep, task, lines)
        if (task, line.candidate.text) in by_place
    }
    for group, members in groups(dict.fromkeys(cell.task for cell in cells)).items():
        for key, _ in _keys(sweep, group, lines):
            of_tasks = [figures.get(key._replace(task=task)) for task in members]
            there = [each for each in of_tasks if each is not None]
            if len(there) == len(members):
                figures[key] = _average(key, there)
    return list(figures.values())


def _keys(sweep: Sweep, task: str, lines: Sequence[Line]) -> Iterator[tuple[Key, Line]]:
    for metric in sweep.metrics:
        for line in lines:
            yield Key(task, line.method, line.keep, metric), line


def _measured(key: Key, cells: Sequence[Cell]) -> Measured:
    errors = [cell.error for cell in cells if cell.outcome is None]
    figure = None
    if len(errors) < len(cells):
        known = [(cell.example, value) for cell in cells if (value := _value(cell, key.metric)) is not None]
        values = by_example(known)
        interval = intervals.of_score(values) if key.metric == SCORE else intervals.of_mean(values)
        figure = Figure.of(fmean(values), interval) if values else None
    examples = len({cell.example for cell in cells})
    return Measured(key, figure, examples, len(errors), errors[0] if errors else None)


def _value(cell: Cell, metric: str) -> float | None:
    if metric == SCORE:
        return cell.score
    outcome = cell.outcome
    if outcome is None:
        return None
    if metric == SECONDS:
        return outcome.prefill_seconds + outcome.select_seconds + outcome.decode_seconds
    return getattr(outcome, metric)


def _average(key: Key, tasks: Sequence[Measured]) -> Measured:
    """Of a group's tasks, each of which counts the same; without a figure where one of them has none."""
    figures = [each.figure for each in tasks if each.figure is not None]
    examples, failed = sum(each.examples for each in tasks), sum(each.failed for each in tasks)
    error = next((each.error for each in tasks if each.error is not None), None)
    if len(figures) < len(tasks):
        return Measured(key, None, examples, failed, error)
    ends = [
        (each.value, Interval(each.low, each.high))
        for each in figures
        if each.low is not None and each.high is not None
    ]
    interval = intervals.of_average(ends) if len(ends) == len(figures) else None
    return Measured(key, Figure.of(fmean(each.value for each in figures), interval), examples, failed, error)
