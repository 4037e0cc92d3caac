"""A task and an engine that need no model."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from keepset.core.budget import Budget
from keepset.lab.candidate import Candidate, candidates
from keepset.lab.record import Record
from keepset.lab.sweep.engine import Portion, Skipped
from keepset.lab.sweep.store import Store
from keepset.lab.sweep.sweep import SweepGrid, count, run, unfinished
from keepset.lab.tasks.task import Example, Generation, Question, Reply, Task
from keepset.recipe import Recipe

CONFIGURATION = {"weights": "0a1b", "--limit": 3, "--mode": "prompt"}


class Counting(Task):
    """What number is in the context?"""

    metric = "found"
    generation = Generation(4)

    def __init__(self, name: str = "counting@8", most: int = 4, decodes: bool = False) -> None:
        self.name, self.most, self.decodes = name, most, decodes

    def examples(self, tokenizer: Any, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        count = self.most if limit is None else min(limit, self.most)
        return [
            Example(str(i), f"It is {i + 10 * seed}.", (Question(" What?", i),), {"depth": float(i)})
            for i in range(count)
        ]

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        return {"found": float(str(question.target) in reply)}


@dataclass
class Scripted:
    """Makes cells of their names, and notes each in a file.

    Attributes:
        stop_at: the cell, counted from 1, before which it waits to be killed.
        together: the number of processes that must have begun before the first of them goes on.
    """

    notes: Path
    stop_at: int | None = None
    together: int = 1
    made: int = 0

    def answer(self, portion: Portion) -> Iterator[Record | Skipped]:
        """Of several examples two side by side, of which the second is done first."""
        examples = iter(portion.examples)
        while several := list(islice(examples, 2)):
            for seed, example in reversed(several):
                yield from self.cells(portion.task, example, portion.candidates, seed)

    def cells(self, task: Task, example: Example, todo: Sequence[Candidate], seed: int) -> Iterator[Record | Skipped]:
        self.notes.with_name(f"{self.notes.name}.{os.getpid()}").touch()
        # However long a process takes to begin: the test's own limit ends it where none does.
        while len(list(self.notes.parent.glob(f"{self.notes.name}.*"))) < self.together:
            time.sleep(0.05)
        for candidate in todo:
            self.made += 1
            if self.made == self.stop_at:
                self.notes.with_name("waiting").touch()
                time.sleep(600)
            with self.notes.open("a") as notes:
                notes.write(f"{os.getpid()} {task.name} {seed} {example.id} {candidate.text}\n")
            yield cell(task, example, candidate, seed)


def cell(task: Task, example: Example, candidate: Candidate, seed: int) -> Record:
    """The same for the same names."""
    names = candidate.text, candidate.method, candidate.requested
    made = Record(*names, task.name, seed, example.id, example.facts, task.metric, error=candidate.error)
    if candidate.error:
        return made
    scores = {task.metric: (len(candidate.text) + int(example.id) + seed) % 3 / 2}
    figures = {"keep": 0.5, "share": 0.5, "kv_bytes": 100, "kv_bytes_full": 200, "tokens": 4.0}
    return replace(made, scores=scores, figures=figures, replies=[f"It is {example.id}"])


def grid(
    names: Sequence[str] = ("counting@8", "counting@16"),
    seeds: Sequence[int] = (0, 1),
    recipes: str = "knorm, tova",
    limit: int | None = 3,
    keeps: Sequence[int | float] = (0.5,),
    decodes: bool = False,
) -> SweepGrid:
    """What most of these tests ask for: 12 portions of 3 cells, or as many cells of tasks that decode."""
    asked = candidates(Recipe.parse_list(recipes), [Budget(keep) for keep in keeps])
    return SweepGrid([Counting(name, decodes=decodes) for name in names], seeds, {name: asked for name in names}, limit)


def portions_of(asked: SweepGrid, store: Store) -> list[Portion]:
    """All portions, of tasks that count no tokens."""
    return asked.portions(store, None)  # type: ignore[arg-type]


def complete(store: Store, asked: SweepGrid, engine: Any) -> list[Skipped]:
    """Make the cells that a file lacks; what could not be made."""
    return run(store, unfinished(portions_of(asked, store), store.done()), engine, lambda: None)


def sweep(path: Path, asked: SweepGrid, engine: Any) -> int:
    """Make all cells; how many of them the file lacked."""
    with Store.begin(path, "model", CONFIGURATION) as store:
        before = len(store.done())
        assert complete(store, asked, engine) == []
        assert count(unfinished(portions_of(asked, store), store.done())) == 0
        return len(store.done()) - before


def cells(path: Path) -> list[Record]:
    with Store.open(path) as store:
        return store.cells()


def in_order(records: Iterable[Record]) -> list[str]:
    return sorted(map(str, records))


def expected(asked: SweepGrid) -> list[Record]:
    """Every cell by itself, in the order in which one process comes to them."""
    return [
        cell(task, example, candidate, seed)
        for task in asked.tasks
        for seed in asked.seeds
        for example in task.examples(None, limit=asked.limit, seed=seed)  # type: ignore[arg-type]
        for candidate in asked.candidates[task.name]
    ]
