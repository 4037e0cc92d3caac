"""A sweep: every recipe on every example, group after group; each cell is written as soon as it is computed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby, product

from keepset.errors import KeepsetError
from keepset.lab.candidate import Candidate
from keepset.lab.memory import is_out_of_memory
from keepset.lab.record import Record
from keepset.lab.sweep.prompts import Mode, PromptBuilder
from keepset.lab.sweep.runner import CellRun, Runner
from keepset.lab.sweep.store import GroupKey, Store
from keepset.lab.tasks.task import Example, Task, Tokenizer

_NO_MEMORY = "memory was not enough"


@dataclass(frozen=True)
class SweepGrid:
    """The requested cells: candidates of every task, on examples of each.

    Attributes:
        tasks: the tasks.
        seeds: the seeds of generated data and of sampling.
        candidates: the candidates of a task, by its name.
        limit: how many of the first examples are taken; None for all.
        sample: a random sample of the examples instead of the first ones: a share up to 1.0, or a number. The task's
            name and the seed determine it.
    """

    tasks: Sequence[Task]
    seeds: Sequence[int]
    candidates: Mapping[str, Sequence[Candidate]]
    limit: int | None = None
    sample: int | float | None = None

    def is_done(self, store: Store) -> bool:
        """Return whether a file has all cells of its known examples."""
        done = store.done()
        for task, seed in product(self.tasks, self.seeds):
            if (examples := store.examples(task.name, seed)) is None:
                return False
            cells = product(examples, self.candidates[task.name])
            if not all(((task.name, seed, example), candidate.text) in done for example, candidate in cells):
                return False
        return True

    def groups(self, store: Store, tokenizer: Tokenizer) -> list[Group]:
        """Make the examples, note them in the file, and return all groups; those of tasks that decode by recipe.

        Raises:
            KeepsetError: two examples of a task have one id, or the file has cells of other examples.
        """
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
            for chosen in [[candidate] for candidate in candidates] if task.decodes else [candidates]:
                groups += [Group(task, seed, example, chosen) for seed, example in of_task]
        return groups

    def _drawn(self, task: Task, examples: Sequence[Example], seed: int) -> Sequence[Example]:
        """Return the sample, in the order of the examples."""
        if self.sample is None:
            return examples
        count = self.sample if isinstance(self.sample, int) else max(1, round(self.sample * len(examples)))
        order = random.Random(f"{task.name} {seed}").sample(range(len(examples)), len(examples))
        return [examples[index] for index in sorted(order[:count])]

    def of(self, cells: Sequence[Record]) -> list[Record]:
        """Return the requested cells, in the order of tasks and candidates."""
        keys = [(task.name, candidate.text) for task in self.tasks for candidate in self.candidates[task.name]]
        order = {names: at for at, names in enumerate(keys)}
        chosen = [cell for cell in cells if (cell.task, cell.recipe) in order and cell.seed in self.seeds]
        return sorted(chosen, key=lambda cell: order[cell.task, cell.recipe])


@dataclass(frozen=True)
class Group:
    """Cells of one example under one seed, which share its prefill; a single cell for a task that decodes."""

    task: Task
    seed: int
    example: Example
    candidates: Sequence[Candidate]

    @property
    def key(self) -> GroupKey:
        """The group's name in the file."""
        return self.task.name, self.seed, self.example.id


@dataclass(frozen=True)
class Skipped:
    """Cells that could not be computed this time. They are not written, so the next run tries again."""

    task: str
    recipe: str
    reason: str


def unfinished(groups: Sequence[Group], done: Collection[tuple[GroupKey, str]]) -> list[Group]:
    """Return the groups with cells that are not in `done`, with only the candidates of these cells."""
    lacking = [
        replace(
            group, candidates=[candidate for candidate in group.candidates if (group.key, candidate.text) not in done]
        )
        for group in groups
    ]
    return [group for group in lacking if group.candidates]


def count(groups: Sequence[Group]) -> int:
    """Return the number of cells that groups have."""
    return sum(len(group.candidates) for group in groups)


@dataclass(frozen=True)
class Cost:
    """The size of a sweep: cells, examples, tokens of all prefills, and the most tokens of questions and answers."""

    cells: int
    examples: int
    prompt_tokens: int
    answer_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.cells:,} cells of {self.examples:,} examples: {self.prompt_tokens:,} tokens of prompts and at most "
            f"{self.answer_tokens:,} of answers"
        )


def cost(groups: Sequence[Group], tokenizer: Tokenizer, mode: Mode, chat: bool) -> Cost:
    """Return the cost of all groups of a sweep, done or not, with prompts of this mode, as chats or not."""
    frames = {use: PromptBuilder(tokenizer, mode=mode, chat=use, longest=None) for use in {chat, False}}
    prompt_tokens = answer_tokens = 0
    for group in groups:
        answer = group.task.generation.tokens
        for prompt in frames[chat and group.task.chat].of(group.example, answer):
            prompt_tokens += len(prompt.ids)
            for question in prompt.questions:
                longest = max(map(len, question.choices), default=answer)
                answer_tokens += len(group.candidates) * (len(question.ids) + longest)
    return Cost(count(groups), len({group.key for group in groups}), prompt_tokens, answer_tokens)


def digest(task: Task, examples: Sequence[Example]) -> str:
    """Return a hash of a task's questions about examples. A target that JSON cannot hold counts by its type."""
    content = [asdict(task.generation), task.metric, [asdict(example) for example in examples]]
    if not task.chat:
        content.append("verbatim")
    text = json.dumps(content, sort_keys=True, default=lambda value: type(value).__qualname__)
    return hashlib.sha256(text.encode()).hexdigest()


def run(store: Store, groups: Sequence[Group], runner: Runner, on_cell: Callable[[], None]) -> list[Skipped]:
    """Compute and write all cells of groups (see `unfinished`); return those for which memory was not enough."""
    skipped = []
    for _, portion in groupby(groups, portion_of):
        for result in work(runner, portion):
            if isinstance(result, Skipped):
                skipped.append(result)
            elif store.save(result):
                on_cell()
    return skipped


def portion_of(group: Group) -> Hashable:
    """Return a key that is equal for groups to run together: all examples of a recipe, in tasks that decode."""
    return (group.task.name, group.candidates[0].text) if group.task.decodes else group.key


def work(runner: Runner, portion: Iterable[Group]) -> Iterator[Record | Skipped]:
    """Yield each cell of one portion as soon as it is made; a group that decodes is taken when there may be room."""
    groups = iter(portion)
    for group in groups:
        if not group.task.decodes:
            yield from _on_one_prefill(runner, group)
            continue
        runs = (CellRun(g.task, g.seed, g.example, *g.candidates) for g in chain([group], groups))
        for cell_run, cell in runner.decode(runs):
            yield cell or Skipped(cell_run.task.name, cell_run.candidate.text, _NO_MEMORY)


def _on_one_prefill(runner: Runner, group: Group) -> Iterator[Record | Skipped]:
    """Compute a group's cells on one prefill.

    If memory is not enough, the next recipe is left out, and the others share another prefill.
    """
    left = list(group.candidates)
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
