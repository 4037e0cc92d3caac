"""`TableRow`: what a recipe's cells on one task come to, or its rows on the tasks of a group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from keepset.bench.analysis import intervals
from keepset.bench.analysis.intervals import Interval
from keepset.bench.cell import Cell, EventMeans, Outcome, means

Cells = Mapping[tuple[int, str], Cell]
"""A recipe's cells on one task, by seed and example."""


@dataclass(frozen=True)
class Figure:
    """A number and its interval of 95 %, whose ends are None where nothing can be said."""

    value: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, value: float, interval: Interval | None) -> Figure:
        """The two together."""
        return cls(value, None, None) if interval is None else cls(value, *interval)


@dataclass(frozen=True)
class TableRow(EventMeans):
    """One recipe on one task, or averaged over the tasks of a group.

    An example counts once, with the mean of its seeds; one on which the recipe failed counts as not answered, in the
    score and in the difference, and `failed` says so. Bytes, seconds and the like are means over the others.

    Attributes:
        task: the task's or the group's name.
        tasks: how many tasks the figures are of; `tasks_of` how many of the group the sweep has.
        examples: how many the recipe was run on; `examples_of` how many any recipe was.
        cut: of how many the context was cut to what the model takes.
        failed: on how many of them it failed, at least once; `error` is the first reason.
        score: the metric's mean; None where it failed on all, or of a group lacks a task.
        difference: mean difference of the scores on the `pairs` examples that recipe and baseline share.
        share: bytes of keys and values, divided by the full cache's.
    """

    task: str
    recipe: str
    method: str
    requested: int | float | None
    metric: str
    examples: int
    examples_of: int
    cut: int = 0
    failed: int = 0
    error: str | None = None
    tasks: int = 1
    tasks_of: int = 1
    score: Figure | None = None
    difference: Figure | None = None
    pairs: int = 0
    keep: float | None = None
    kv_bytes: float | None = None
    kv_bytes_full: float | None = None
    share: float | None = None
    tokens: float | None = None
    finished: float | None = None
    repetition: float | None = None
    prefill_seconds: float | None = None
    select_seconds: float | None = None
    decode_seconds: float | None = None
    batch: float | None = None
    peak_bytes: float | None = None


def table_row(cells: Cells, baseline: Cells | None, examples: Collection[str]) -> TableRow:
    """What a recipe's cells come to, beside those of what it is compared with."""
    first = next(iter(cells.values()))
    failures = [cell for cell in cells.values() if cell.outcome is None]
    row = TableRow(
        task=first.task,
        recipe=first.recipe,
        method=first.method,
        requested=first.requested,
        metric=first.metric,
        examples=len({example for _, example in cells}),
        examples_of=len(examples),
        cut=len({cell.example for cell in cells.values() if "cut" in cell.facts}),
        failed=len({cell.example for cell in failures}),
        error=failures[0].error if failures else None,
    )
    outcomes = [cell.outcome for cell in cells.values() if cell.outcome is not None]
    if not outcomes:
        return row
    scores = by_example((example, cell.score) for (_, example), cell in cells.items())
    row = replace(row, **_costs(outcomes), score=Figure.of(fmean(scores), intervals.of_score(scores)))
    if baseline is None or not any(cell.outcome for cell in baseline.values()):
        return row
    both = [unit for unit in cells if unit in baseline]
    differences = by_example((unit[1], cells[unit].score - baseline[unit].score) for unit in both)
    if not differences:
        return row
    figure = Figure.of(fmean(differences), intervals.of_difference(differences))
    return replace(row, difference=figure, pairs=len(differences))


def average(group: str, rows: Sequence[TableRow], tasks: int) -> TableRow:
    """A recipe's rows on a group's tasks, each of which counts the same; without a score where it lacks one."""
    scored = [each for each in rows if each.score is not None]
    row = TableRow(
        task=group,
        recipe=rows[0].recipe,
        method=rows[0].method,
        requested=rows[0].requested,
        metric=rows[0].metric if len({each.metric for each in rows}) == 1 else "mean",
        **{name: sum(getattr(each, name) for each in rows) for name in ("examples", "examples_of", "cut", "failed")},
        error=next((each.error for each in rows if each.error is not None), None),
        tasks=len(scored),
        tasks_of=tasks,
    )
    if len(scored) < tasks:
        return row
    compared = all(each.difference is not None for each in scored)
    return replace(
        row,
        **_costs(scored),
        score=_mean(each.score for each in scored),
        difference=_mean(each.difference for each in scored) if compared else None,
        pairs=sum(each.pairs for each in scored) if compared else 0,
    )


def by_example(values: Iterable[tuple[str, float]]) -> list[float]:
    """The mean of each example's values, in the order of the examples' first ones."""
    by_id: dict[str, list[float]] = {}
    for example, value in values:
        by_id.setdefault(example, []).append(value)
    return [fmean(each) for each in by_id.values()]


def _mean(figures: Iterable[Figure | None]) -> Figure:
    parts = []
    for figure in figures:
        assert figure is not None and figure.low is not None and figure.high is not None
        parts.append((figure.value, Interval(figure.low, figure.high)))
    return Figure.of(fmean(value for value, _ in parts), intervals.of_average(parts))


def _costs(parts: Sequence[Outcome] | Sequence[TableRow]) -> dict[str, Any]:
    costs: dict[str, Any] = means(parts)
    full = costs["kv_bytes_full"]
    return {**costs, "share": costs["kv_bytes"] / full if full else None}
