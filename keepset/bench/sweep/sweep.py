"""A sweep: every recipe on every example, group after group, each cell written as soon as it is there."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby, product
from typing import cast

from keepset.bench.candidate import Candidate
from keepset.bench.cell import Cell
from keepset.bench.memory import is_out_of_memory
from keepset.bench.sweep.runner import EvalRequest, Runner
from keepset.bench.sweep.store import Key, Store
from keepset.bench.tasks.task import Example, Task, Tokenizer
from keepset.errors import KeepsetError

POLL = 1.0
"""Seconds between looks at what another process has claimed."""
_NO_MEMORY = "memory was not enough"


@dataclass(frozen=True)
class Grid:
    """What is asked for: candidates of every task, by its name, on examples of each.

    These are the first `limit`, or a random `sample`, which is a share of them up to 1.0, or a number; all if neither
    is given. A sample is drawn by the task's name and the seed.
    """

    tasks: Sequence[Task]
    seeds: Sequence[int]
    candidates: Mapping[str, Sequence[Candidate]]
    limit: int | None = None
    sample: int | float | None = None

    def is_done(self, store: Store) -> bool:
        """Whether a file has all of it, as far as it knows which examples there are."""
        done = store.done()
        for task, seed in product(self.tasks, self.seeds):
            if (examples := store.examples(task.name, seed)) is None:
                return False
            wanted = product(examples, self.candidates[task.name])
            if not all(((task.name, seed, example), candidate.text) in done for example, candidate in wanted):
                return False
        return True

    def groups(self, store: Store, tokenizer: Tokenizer) -> list[Group]:
        """All of it, example by example, or recipe by recipe; which examples there are is noted in the file."""
        groups = []
        for task in self.tasks:
            candidates, of_task = self.candidates[task.name], list[tuple[int, Example]]()
            for seed in self.seeds:
                examples = self._drawn(task, task.examples(tokenizer, limit=self.limit, seed=seed), seed)
                ids = [example.id for example in examples]
                if len(set(ids)) < len(ids):
                    raise KeepsetError(f"{task.name} has several examples of one id: give each an id of its own.")
                store.register(task.name, seed, ids, digest(task, examples))
                of_task += [(seed, example) for example in examples]
            for chosen in [[each] for each in candidates] if task.decodes else [candidates]:
                groups += [Group(task, seed, example, chosen) for seed, example in of_task]
        return groups

    def _drawn(self, task: Task, examples: Sequence[Example], seed: int) -> Sequence[Example]:
        """The sample, in the order of the examples."""
        if self.sample is None:
            return examples
        count = self.sample if isinstance(self.sample, int) else max(1, round(self.sample * len(examples)))
        order = random.Random(f"{task.name} {seed}").sample(range(len(examples)), len(examples))
        return [examples[index] for index in sorted(order[:count])]

    def of(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those cells that are asked for, in the order of tasks and candidates."""
        wanted = [(task.name, candidate.text) for task in self.tasks for candidate in self.candidates[task.name]]
        place = {names: at for at, names in enumerate(wanted)}
        chosen = [cell for cell in cells if (cell.task, cell.recipe) in place and cell.seed in self.seeds]
        return sorted(chosen, key=lambda cell: place[cell.task, cell.recipe])


@dataclass(frozen=True)
class Group:
    """All cells of one example under one seed, which share its prefill; of a task that decodes one cell alone."""

    task: Task
    seed: int
    example: Example
    candidates: Sequence[Candidate]

    @property
    def key(self) -> Key:
        """What the file knows it by."""
        return self.task.name, self.seed, self.example.id

    @property
    def recipes(self) -> list[str]:
        """The candidates' texts."""
        return [candidate.text for candidate in self.candidates]


Claim = tuple[Group, list[str]]
"""A group and those of its recipes that are this process's to make."""


@dataclass(frozen=True)
class Skipped:
    """Stands for cells that could not be made this time. They are not written, so that the next run tries again."""

    task: str
    recipe: str
    reason: str


def unfinished(groups: Sequence[Group], done: Collection[tuple[Key, str]]) -> list[Group]:
    """Those that lack a cell."""
    return [group for group in groups if count([group], done) < count([group])]


def count(groups: Sequence[Group], done: Collection[tuple[Key, str]] | None = None) -> int:
    """How many cells they have, once all or only those in `done` are there."""
    return sum(done is None or (group.key, recipe) in done for group in groups for recipe in group.recipes)


def digest(task: Task, examples: Sequence[Example]) -> str:
    """Of all that a task asks; what its targets hold that JSON cannot say counts by its type."""
    content = [asdict(task.generation), task.metric, [asdict(example) for example in examples]]
    if not task.chat:
        content.append("verbatim")
    text = json.dumps(content, sort_keys=True, default=lambda value: type(value).__qualname__)
    return hashlib.sha256(text.encode()).hexdigest()


def run(store: Store, groups: Sequence[Group], runner: Runner, on_cells: Callable[[int], None]) -> list[Skipped]:
    """Makes all cells that are missing, together with whoever else is at it; those that could not be had come back.

    `on_cells` is told how many more cells of the groups are there.
    """
    skipped = []
    for portion, claims in groupby(claimed(store, groups, on_cells), portion_of):
        if portion is None:
            for _ in claims:
                time.sleep(POLL)
            continue
        for key, result in work(runner, cast(Iterator[Claim], claims)):
            if isinstance(result, Skipped):
                skipped.append(result)
                store.release(key, [result.recipe])
            elif store.save(result):
                on_cells(1)
    return skipped


def claimed(store: Store, groups: Sequence[Group], on_cells: Callable[[int], None]) -> Iterator[Claim | None]:
    """Groups that are now this process's, each with the recipes that it lacks.

    None where all that is left is another process's for now.
    """
    waiting = groups
    while waiting:
        held = []
        for group in waiting:
            missing = store.claim(group.key, group.recipes)
            if missing is None:
                held.append(group)
                continue
            on_cells(len(group.candidates) - len(missing))
            if missing:
                yield group, missing
        waiting = held
        if waiting:
            yield None


def portion_of(claim: Claim | None) -> Hashable:
    """The same for neighbours that are worked on together: of tasks that decode, all examples under one recipe."""
    if claim is None:
        return None
    group, _ = claim
    return (group.task.name, *group.recipes) if group.task.decodes else group.key


def work(runner: Runner, claims: Iterator[Claim]) -> Iterator[tuple[Key, Cell | Skipped]]:
    """The cells of one portion, as they are made; a claim is taken from the iterator when it may begin."""
    for claim in claims:
        group, recipes = claim
        if not group.task.decodes:
            yield from ((group.key, result) for result in _on_one_prefill(runner, group, recipes))
            continue
        asked = (
            EvalRequest(group.task, group.seed, group.example, *group.candidates) for group, _ in chain([claim], claims)
        )
        for each, cell in runner.decode(asked):
            skipped = Skipped(each.task.name, each.candidate.text, _NO_MEMORY)
            yield (each.task.name, each.seed, each.example.id), cell or skipped


def _on_one_prefill(runner: Runner, group: Group, recipes: Sequence[str]) -> Iterator[Cell | Skipped]:
    """The group's cells of these recipes.

    Where memory is not enough the recipe that is next is left out, and the others share a prefill of their own.
    """
    left = [candidate for candidate in group.candidates if candidate.text in recipes]
    while left:
        try:
            for cell in runner.run(group.task, group.example, left, group.seed):
                left = [candidate for candidate in left if candidate.text != cell.recipe]
                yield cell
            return
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        skipped, *left = left
        yield Skipped(group.task.name, skipped.text, _NO_MEMORY)
