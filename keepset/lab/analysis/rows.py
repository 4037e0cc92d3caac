"""`Row`: the means of a recipe's records on one task, or of its rows on the tasks of a group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from keepset.lab.analysis.intervals import Figure, of_average, of_difference, of_score
from keepset.lab.record import FIGURES, Record, mean_figures

Records = Mapping[tuple[int, str], Record]
"""A recipe's records on one task, by seed and example."""


@dataclass(frozen=True)
class Row:
    """One recipe on one task, or averaged over the tasks of a group.

    An example counts once, with the mean over its seeds. An example on which the recipe failed counts as not answered
    in the score and in the difference; bytes, seconds and the like are means over the others.

    Attributes:
        method: the recipe's text without its budget; `requested` is the requested budget.
        metric: the score that counts.
        examples: number of examples of the recipe; `examples_of` those of any recipe.
        cut: number of examples whose context was cut to the model's limit.
        failed: number of examples on which the recipe failed at least once; `error` is the first reason.
        tasks: number of tasks in the figures; `tasks_of` the number of the group's tasks in the sweep.
        score: the metric's mean; None if the recipe failed on all examples, or lacks a task of a group.
        difference: mean difference of the scores on the `pairs` examples that recipe and baseline both have.
        means: means of `FIGURES`; None if unknown.
    """

    task: str
    recipe: str
    method: str
    requested: str | None
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
    means: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(FIGURES))

    def to_json(self) -> dict[str, Any]:
        """Return the row with its means among its other figures."""
        row = asdict(self)
        means = row.pop("means")
        return {**row, **means}


def row_of(records: Records, baseline: Records | None, examples: Collection[str]) -> Row:
    """Return the row of a recipe on one task.

    Args:
        records: the recipe's records.
        baseline: the baseline's records; None for no differences.
        examples: the examples of any recipe.
    """
    first = next(iter(records.values()))
    failures = [record for record in records.values() if record.error is not None]
    row = Row(
        task=first.task,
        recipe=first.recipe,
        method=first.method,
        requested=first.requested,
        metric=first.metric,
        examples=len({example for _, example in records}),
        examples_of=len(examples),
        cut=len({record.example for record in records.values() if "cut" in record.facts}),
        failed=len({record.example for record in failures}),
        error=failures[0].error if failures else None,
    )
    if len(failures) == len(records):
        return row
    scores = by_example((example, record.score) for (_, example), record in records.items())
    costs = mean_figures([record.figures for record in records.values() if record.error is None])
    row = replace(row, means=costs, score=of_score(scores))
    if baseline is None or all(record.error is not None for record in baseline.values()):
        return row
    paired = [unit for unit in records if unit in baseline]
    differences = by_example((unit[1], records[unit].score - baseline[unit].score) for unit in paired)
    return replace(row, difference=of_difference(differences), pairs=len(differences))


def average(group: str, rows: Sequence[Row], tasks: int) -> Row:
    """Return the average of a recipe's rows on a group's tasks, with equal weights.

    Args:
        group: the group's name.
        rows: the recipe's rows.
        tasks: how many tasks the group has; the average has a score only if each of them has one.
    """
    scores = [task_row.score for task_row in rows if task_row.score is not None]
    row = Row(
        task=group,
        recipe=rows[0].recipe,
        method=rows[0].method,
        requested=rows[0].requested,
        metric=rows[0].metric if len({task_row.metric for task_row in rows}) == 1 else "mean",
        **{
            name: sum(getattr(task_row, name) for task_row in rows)
            for name in ("examples", "examples_of", "cut", "failed")
        },
        error=next((task_row.error for task_row in rows if task_row.error is not None), None),
        tasks=len(scores),
        tasks_of=tasks,
    )
    if len(scores) < tasks:
        return row
    row = replace(row, means=mean_figures([task_row.means for task_row in rows]), score=of_average(scores))
    differences = [task_row.difference for task_row in rows if task_row.difference is not None]
    if len(differences) < len(rows):
        return row
    return replace(row, difference=of_average(differences), pairs=sum(task_row.pairs for task_row in rows))


def by_example(values: Iterable[tuple[str, float]]) -> list[float]:
    """Return the mean of each example's values, in the order in which examples first appear."""
    by_id: dict[str, list[float]] = {}
    for example, value in values:
        by_id.setdefault(example, []).append(value)
    return [fmean(example_values) for example_values in by_id.values()]
