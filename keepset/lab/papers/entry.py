"""Types of a paper's table or figure: the runs for it, and the measured figures."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from keepset.core.budget import Budget
from keepset.lab.analysis.intervals import Figure
from keepset.lab.candidate import FULL_CACHE, Candidate
from keepset.lab.sweep.prompts import Mode
from keepset.lab.sweep.sweep import SweepGrid
from keepset.lab.tasks.find import find
from keepset.lab.tasks.task import TaskSettings, Tokenizer
from keepset.recipe import Recipe, Schedule

SCORE = "score"
"""The metric of figures that are the task's own score."""
SECONDS = "seconds"
"""The metric of figures that are the time of a whole answer: prefill, selection and decoding."""
AREA = "area"
"""The metric of the area under the score over the kept share, for all tasks and budgets (`bench.analysis.curves`)."""

AVERAGE = "average"
"""The name in place of a model if a paper prints means over its models."""

_PROMPTS_END = Schedule()
_MADE_BY = {"stats": "calibrate", "tables": "compile"}
"""Files of a model that recipes may name, and the commands that make them."""
_GENERATED = ("needle", "niah_", "ruler_vt", "ruler_cwe", "ruler_fwe")
"""The prefixes of tasks that need no data."""


def removed_at(tolerance: float) -> str:
    """Return the metric of the share of the cache that can be dropped within a relative loss of score."""
    return f"removed at a loss of {tolerance:.0%}"


class FigureKey(NamedTuple):
    """The place of a figure in a table.

    Attributes:
        task: the task's name, with a fact if the figure covers only some examples: `math500, level 5`.
        method: the paper's name of the method.
        keep: the budget; None without one, or if the method decides.
        metric: `SCORE`, `SECONDS`, the name of a cost of a cell, such as `tokens`, `AREA`, or one of `removed_at`.
    """

    task: str
    method: str
    keep: int | float | None
    metric: str


@dataclass(frozen=True)
class MeasuredFigure:
    """A figure that was measured over `examples` examples, of which `failed` have no result."""

    key: FigureKey
    figure: Figure | None
    examples: int
    failed: int = 0
    error: str | None = None


@dataclass(frozen=True)
class PaperOptions:
    """Settings of a user that replace the paper's; None or empty for the paper's own.

    `files` are the model's statistics and tables that recipes name in braces.
    """

    limit: int | None = None
    seed: int = 0
    answer_tokens: int | None = None
    lengths: tuple[int, ...] = ()
    data: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepLine:
    """One method under one budget, by the paper's name."""

    method: str
    keep: int | float | None
    candidate: Candidate


@dataclass(frozen=True)
class Sweep:
    """A grid: methods under budgets on tasks, all asked in one way.

    Attributes:
        tasks: names of tasks in `keepset eval`.
        methods: recipes by the paper's names. A recipe that lacks a file of the model names it in braces:
            `triattention(stats={stats})`.
        keeps: budgets of the recipes that need one and name none.
        schedule: the schedule of recipes that name none.
        always: how many of the first and of the newest tokens stay under recipes that do not say it.
        full: the paper's name of the full cache; empty if it is not in the table.
        metrics: the metrics in the table.
        lengths: tokens of prompts, for tasks that are made to a length.
        answer_tokens: the longest answer in tokens, by task; the task's own for tasks that are not named.
        limit, sample: examples of each task; see `Grid`.
        by: facts of the examples, such as `level`; each value of a fact gets separate figures.
        mode, alone: see `Asking`.
        differences: pairs of methods by the paper's names of their difference: the first less the second.
        solved_by, missed_by: methods. Only examples count that the first answers correctly and the second wrongly under
            the same budget.
        average: the table's name for the mean over all tasks and for figures of all tasks together; empty for none.
        suffix: follows the names of tasks, where another sweep of the entry has the same tasks.
        name: distinguishes the sweeps of an entry in the names of their files.
        file: the prefix of the file's name; empty for the entry's id. Entries that share cells share it.
    """

    tasks: tuple[str, ...]
    methods: Mapping[str, str]
    keeps: tuple[int | float, ...] = ()
    schedule: Schedule = _PROMPTS_END
    always: tuple[int, int] = (0, 0)
    full: str = "Full KV"
    metrics: tuple[str, ...] = (SCORE,)
    lengths: tuple[int, ...] = (4096,)
    answer_tokens: Mapping[str, int] = field(default_factory=dict)
    limit: int | None = None
    sample: int | float | None = None
    by: tuple[str, ...] = ()
    mode: Mode = "prompt"
    alone: bool = False
    differences: Mapping[str, Sequence[str]] = field(default_factory=dict)
    solved_by: str = ""
    missed_by: str = ""
    average: str = ""
    suffix: str = ""
    name: str = ""
    file: str = ""

    def lines(self, files: Mapping[str, Path]) -> list[SweepLine]:
        """Return every method under every budget, the full cache first; see `recipe_of` for `files`."""
        lines = [SweepLine(self.full, None, FULL_CACHE)] if self.full else []
        for method, text in self.methods.items():
            recipe = recipe_of(text, files)
            if recipe.schedule == _PROMPTS_END:
                recipe = replace(recipe, schedule=self.schedule)
            fixed = recipe.budget.is_given or not recipe.method.traits.needs_budget
            for keep in (recipe.budget.keep,) if fixed else self.keeps:
                budget = None if fixed else Budget(keep)
                lines.append(SweepLine(method, keep, Candidate.of(recipe, budget, None, self.always)))
        return lines


@dataclass(frozen=True)
class Entry:
    """A table or figure of a paper.

    Attributes:
        name: its id on the command line: `ams-table-1`.
        source: the paper, and the number of the table or figure.
        title: what it shows.
        models: the paper's models, by their names on the hub.
        sweeps: the grids that are run for it.
        measure: a function that is run in place of grids; `takes` describes its default work.
        published: the paper's own figures by model, in the units of measured ones; empty if the text has none. Under
            `AVERAGE` it has means over all models.
        note: facts that the paper leaves open, and keepset's choices for them.
    """

    name: str
    source: str
    title: str
    models: tuple[str, ...]
    sweeps: tuple[Sweep, ...] = ()
    measure: Callable[[PreTrainedModel, Tokenizer, PaperOptions], Sequence[MeasuredFigure]] | None = None
    takes: str = ""
    published: Mapping[str, Mapping[FigureKey, float]] = field(default_factory=dict)
    note: str = ""

    @property
    def data(self) -> list[str]:
        """Tasks whose data neither come with keepset nor are generated."""
        tasks = dict.fromkeys(task for sweep in self.sweeps for task in sweep.tasks)
        return [task for task in tasks if not task.startswith(_GENERATED)]

    @property
    def state(self) -> str:
        """A line with the requirements for running the entry as the paper did."""
        found = (re.search(r"(\d+(?:\.\d+)?)B\b", model) for model in self.models)
        sizes = ", ".join(f"{size:g}B" for size in sorted({float(size[1]) for size in found if size}))
        texts = "".join(text for sweep in self.sweeps for text in sweep.methods.values())
        texts += "".join(getattr(self.measure, "keywords", {}).get("methods", {}).values())
        needs = [f"models of {sizes}" if "," in sizes else f"a model of {sizes}"]
        needs += [
            f"--{name} (keepset {command})"
            for name, command in _MADE_BY.items()
            if f"{{{name}}}" in texts or f"--{name}" in self.takes
        ]
        needs += [f"data: {', '.join(self.data)}"] if self.data else []
        return f"needs {'; '.join(needs)}"


def grid_of(sweep: Sweep, options: PaperOptions) -> SweepGrid:
    """Return the tasks and recipes of a paper's sweep, with the user's replacements.

    Args:
        sweep: the paper's sweep.
        options: the user's replacements.

    Raises:
        KeepsetError: if a task is unknown or an option out of range.
    """
    tasks = find(sweep.tasks, TaskSettings(options.data, options.lengths or sweep.lengths))
    for task in tasks:
        tokens = sweep.answer_tokens.get(task.name.partition("@")[0])
        if tokens is not None:
            task.generation = replace(task.generation, tokens=tokens)
    candidates = list({line.candidate.text: line.candidate for line in sweep.lines(options.files)}.values())
    limit, sample = (sweep.limit, sweep.sample) if options.limit is None else (options.limit, None)
    return SweepGrid(
        tasks, [options.seed], {task.name: candidates for task in tasks}, limit, sample, options.answer_tokens
    )


def count_idle(grid: SweepGrid) -> dict[str, int]:
    """Return for each task how many recipes never compress, because answers end before their first event.

    Such a recipe compresses no prompt, and its interval is at least as long as the longest answer.
    """
    recipes = {
        task.name: sum(
            not recipe.schedule.prefill and (recipe.schedule.every or 0) >= task.generation.tokens
            for candidate in grid.candidates[task.name]
            if (recipe := candidate.recipe) is not None
        )
        for task in grid.tasks
    }
    return {task: count for task, count in recipes.items() if count}


def recipe_of(text: str, files: Mapping[str, Path]) -> Recipe:
    """Return the recipe of a text that may name files of the model in braces, such as `triattention(stats={stats})`.

    Args:
        text: the text.
        files: the files by name. A missing one becomes an empty path, which means the model's own file.
    """
    named = defaultdict(lambda: "''", {name: repr(str(path)) for name, path in files.items()})
    return Recipe.parse(text.format_map(named))
