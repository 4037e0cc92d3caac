"""`Entry`: one table or figure of a paper: what is run for it, on which model, with which data."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from keepset.bench.analysis.rows import Figure
from keepset.bench.candidate import Candidate
from keepset.bench.cell import FULL
from keepset.bench.sweep.prompts import Mode
from keepset.bench.tasks.task import Tokenizer
from keepset.recipe import Recipe, Schedule

SCORE = "score"
"""The metric of a figure that is the task's own."""
SECONDS = "seconds"
"""The metric of a whole answer's time: prefill, selecting and decoding."""
AREA = "area"
"""Under the score over what is kept, of all tasks and budgets together: see `bench.analysis.curves`."""


def removed_at(tolerance: float) -> str:
    """The metric that says how much can go within a relative loss of score, of all tasks and budgets together."""
    return f"removed at a loss of {tolerance:.0%}"


AT_THE_PROMPTS_END = Schedule()
_MADE_BY = {"stats": "calibrate", "tables": "compile"}
"""Files of a model that recipes may name, and the commands that make them."""
_MADE_HERE = ("needle", "niah_", "ruler_vt", "ruler_cwe", "ruler_fwe")


class Key(NamedTuple):
    """Where a figure stands in a table.

    Attributes:
        task: its name, and of a part of its examples also the fact: `math500, level 5`.
        method: the paper's name of what was run.
        keep: the budget, None where there is none or the method decides.
        metric: `SCORE`, `SECONDS`, the name of a cost of a cell, such as `tokens`, `AREA`, or one of `removed_at`.
    """

    task: str
    method: str
    keep: int | float | None
    metric: str


@dataclass(frozen=True)
class Measured:
    """A figure that was measured: over so many examples, on `failed` of which there was none."""

    key: Key
    figure: Figure | None
    examples: int
    failed: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Options:
    """What a user may ask for otherwise than the paper had it; None or empty where it is to be the paper's.

    `files` stand for what recipes name in braces: measured statistics and compiled tables of the model.
    """

    limit: int | None = None
    seed: int = 0
    answer_tokens: int | None = None
    lengths: tuple[int, ...] = ()
    data: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One method under one budget, by the paper's name."""

    method: str
    keep: int | float | None
    candidate: Candidate


@dataclass(frozen=True)
class Sweep:
    """A grid: methods under budgets on tasks, all asked one way.

    Attributes:
        tasks: as `keepset eval` knows them.
        methods: recipes by the paper's names of them. A recipe that lacks a file of the model names it in braces:
            `triattention(stats={stats})`.
        keeps: budgets of the recipes that name none and need one.
        schedule: when recipes compress that do not say it.
        always: how many of the first and the newest tokens stay under every recipe that does not say it.
        full: the paper's name of the full cache; empty where it is not in the table.
        metrics: what the table shows of each.
        lengths: in tokens, of tasks made to a length.
        answer_tokens: of an answer at most, by task; the task's own where it is not named.
        limit, sample: examples of each task; see `Grid`.
        by: facts of the examples, such as `level`: each of their values gets figures of its own.
        mode, chat, temperature, alone: see `Runner`.
        average: the table's name for the mean over all tasks, and for what is said of them together; empty without.
        suffix: what follows the names of tasks where another sweep of the entry has the same.
        name: tells an entry's sweeps apart, in the names of their files.
        file: begins those names in place of the entry's, where several entries show the same cells.
    """

    tasks: tuple[str, ...]
    methods: Mapping[str, str]
    keeps: tuple[int | float, ...] = ()
    schedule: Schedule = AT_THE_PROMPTS_END
    always: tuple[int, int] = (0, 0)
    full: str = "Full KV"
    metrics: tuple[str, ...] = (SCORE,)
    lengths: tuple[int, ...] = (4096,)
    answer_tokens: Mapping[str, int] = field(default_factory=dict)
    limit: int | None = None
    sample: int | float | None = None
    by: tuple[str, ...] = ()
    mode: Mode = "prompt"
    chat: bool = True
    temperature: float = 0.0
    alone: bool = False
    average: str = ""
    suffix: str = ""
    name: str = ""
    file: str = ""

    def lines(self, files: Mapping[str, Path]) -> list[Line]:
        """Every method under every budget, the full cache first; a file that is not given is the model's own."""
        lines = [Line(self.full, None, Candidate(None, FULL, FULL, 1.0))] if self.full else []
        for method, text in self.methods.items():
            recipe = recipe_of(text, files)
            if recipe.schedule == AT_THE_PROMPTS_END:
                recipe = replace(recipe, schedule=self.schedule)
            fixed = recipe.budget.keep is not None or not recipe.method.needs_budget
            for keep in (recipe.budget.keep,) if fixed else self.keeps:
                lines.append(Line(method, keep, Candidate.of(recipe, keep, None, self.always)))
        return lines


Measure = Callable[[PreTrainedModel, Tokenizer, Options], Sequence[Measured]]


@dataclass(frozen=True)
class Measurement:
    """Anything that is no grid: a function of the model and of texts that it finds itself.

    `takes` says what that is, where no option says otherwise.
    """

    measure: Measure
    takes: str


@dataclass(frozen=True)
class Entry:
    """A table or figure of a paper.

    Attributes:
        name: as the command line has it: `ams-table-1`.
        source: paper, and number of the table or figure.
        title: what it shows.
        models: the paper's, by their names on the hub.
        parts: what is run for it.
        note: what the paper leaves open, and how it is here.
    """

    name: str
    source: str
    title: str
    models: tuple[str, ...]
    parts: tuple[Sweep | Measurement, ...]
    note: str = ""

    @property
    def sweeps(self) -> list[Sweep]:
        """Those parts that are grids."""
        return [part for part in self.parts if isinstance(part, Sweep)]

    @property
    def data(self) -> list[str]:
        """Tasks whose data are neither made here nor come with keepset."""
        tasks = dict.fromkeys(task for sweep in self.sweeps for task in sweep.tasks)
        return [task for task in tasks if not task.startswith(_MADE_HERE)]

    @property
    def state(self) -> str:
        """What it takes to run it as the paper did."""
        sizes = ", ".join(f"{size:g}B" for size in sorted(set(_sizes(self.models))))
        texts = "".join(text for sweep in self.sweeps for text in sweep.methods.values())
        needs = [f"models of {sizes}" if "," in sizes else f"a model of {sizes}"]
        needs += [f"--{name} (keepset {command})" for name, command in _MADE_BY.items() if f"{{{name}}}" in texts]
        needs += [f"data: {', '.join(self.data)}"] if self.data else []
        return f"needs {'; '.join(needs)}"


def recipe_of(text: str, files: Mapping[str, Path]) -> Recipe:
    """The recipe of a text that may name a file of the model in braces; one that is not given is the model's own."""
    return Recipe.parse(text.format_map(_Files(files)))


class _Files(dict[str, str]):
    """Names of files as texts of a recipe; an empty one for what the model brings itself."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        super().__init__({name: repr(str(path)) for name, path in files.items()})

    def __missing__(self, name: str) -> str:
        return "''"


def _sizes(models: Sequence[str]) -> Iterator[float]:
    for model in models:
        if size := re.search(r"(\d+(?:\.\d+)?)B\b", model):
            yield float(size[1])
