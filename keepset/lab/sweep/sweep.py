"""A sweep: every recipe on every example, portion after portion; each cell is written as soon as it is computed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

from keepset.errors import KeepsetError
from keepset.lab.candidate import Candidate
from keepset.lab.record import Record
from keepset.lab.sweep import chats
from keepset.lab.sweep.engine import Engine, Portion, Skipped
from keepset.lab.sweep.prompts import Asking, PromptBuilder
from keepset.lab.sweep.store import Key, Store
from keepset.lab.tasks.chat import ChatTask
from keepset.lab.tasks.chat_example import ChatExample
from keepset.lab.tasks.task import Example, Task, Tokenizer


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
        answer_tokens: the most tokens of an answer; None for each task's own.
    """

    tasks: Sequence[Task]
    seeds: Sequence[int]
    candidates: Mapping[str, Sequence[Candidate]]
    limit: int | None = None
    sample: int | float | None = None
    answer_tokens: int | None = None

    def is_done(self, store: Store) -> bool:
        """Return whether a file has all cells of its known examples."""
        done = store.done()
        for task, seed in product(self.tasks, self.seeds):
            if (examples := store.examples(task.name, seed)) is None:
                return False
            cells = product(examples, self.candidates[task.name])
            if any((task.name, seed, example, candidate.text) not in done for example, candidate in cells):
                return False
        return True

    def portions(self, store: Store, tokenizer: Tokenizer) -> list[Portion]:
        """Make the examples, note them in the file, and return all cells.

        Args:
            store: the sweep's file.
            tokenizer: the model's tokenizer, for tasks that are made to a length.

        Returns:
            A portion for each example; of a task that decodes, one for each recipe.

        Raises:
            KeepsetError: two examples of a task have one id, or the file has cells of other examples.
        """
        portions = []
        for task in self.tasks:
            candidates, of_task = self.candidates[task.name], list[tuple[int, Example]]()
            for seed in self.seeds:
                examples = self._drawn(task, task.examples(tokenizer, limit=self.limit, seed=seed), seed)
                ids = [example.id for example in examples]
                if len(set(ids)) < len(ids):
                    raise KeepsetError(f"{task.name} has several examples of one id: give each an id of its own.")
                store.register(task.name, seed, ids, digest(task, examples))
                of_task += [(seed, example) for example in examples]
            if task.decodes:
                portions += [Portion(task, of_task, [candidate]) for candidate in candidates]
            else:
                portions += [Portion(task, [example], candidates) for example in of_task]
        return portions

    def _drawn(self, task: Task, examples: Sequence[Example], seed: int) -> Sequence[Example]:
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


def unfinished(portions: Sequence[Portion], done: Collection[Key]) -> list[Portion]:
    """Return the portions with cells that are not in `done`, without examples and candidates that have all of theirs.

    Args:
        portions: those of `SweepGrid.portions`.
        done: the cells of the file.
    """
    lacking = []
    for portion in portions:
        missing = [
            (seed, example, candidate)
            for (seed, example), candidate in product(portion.examples, portion.candidates)
            if (portion.task.name, seed, example.id, candidate.text) not in done
        ]
        if missing:
            examples = {(seed, example.id): (seed, example) for seed, example, _ in missing}
            candidates = {candidate.text: candidate for _, _, candidate in missing}
            lacking.append(replace(portion, examples=list(examples.values()), candidates=list(candidates.values())))
    return lacking


def count(portions: Sequence[Portion]) -> int:
    """Return the number of cells."""
    return sum(map(len, portions))


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


def cost(portions: Sequence[Portion], tokenizer: Tokenizer, asking: Asking) -> Cost:
    """Return the cost of all cells of a sweep, done or not.

    Args:
        portions: the cells.
        tokenizer: the model's tokenizer.
        asking: how they are asked.

    Raises:
        KeepsetError: the mode does not suit an example.
    """
    examples = set[tuple[str, int, str]]()
    prompt_tokens = answer_tokens = 0
    for portion in portions:
        prompts, answer = PromptBuilder(tokenizer, portion.task, asking, None), portion.task.generation.tokens
        for seed, example in portion.examples:
            examples.add((portion.task.name, seed, example.id))
            if isinstance(portion.task, ChatTask) and isinstance(example, ChatExample):
                of_chat = chats.cost(portion.task, example, portion.candidates)
                prompt_tokens, answer_tokens = prompt_tokens + of_chat[0], answer_tokens + of_chat[1]
                continue
            for prompt in prompts.of(example):
                prompt_tokens += len(prompt.ids)
                for question in prompt.questions:
                    longest = max(map(len, question.choices), default=answer)
                    answer_tokens += len(portion.candidates) * (len(question.ids) + longest)
    return Cost(count(portions), len(examples), prompt_tokens, answer_tokens)


def digest(task: Task, examples: Sequence[Example]) -> str:
    """Return a hash of a task's questions about examples, in hexadecimal digits.

    Args:
        task: the task.
        examples: the examples. A target that JSON cannot hold counts by its type.
    """
    content = [asdict(task.generation), task.metric, [asdict(example) for example in examples]]
    if not task.chat:
        content.append("verbatim")
    text = json.dumps(content, sort_keys=True, default=lambda value: type(value).__qualname__)
    return hashlib.sha256(text.encode()).hexdigest()


def run(store: Store, portions: Sequence[Portion], engine: Engine, on_cell: Callable[[], None]) -> list[Skipped]:
    """Compute and write all cells.

    Args:
        store: the sweep's file, which gets every cell at once.
        portions: the cells, see `unfinished`.
        engine: computes them.
        on_cell: called for each written cell.

    Returns:
        The cells for which memory was not enough.

    Raises:
        KeepsetError: the file cannot be written.
    """
    skipped = []
    for portion in portions:
        for result in engine.answer(portion):
            if isinstance(result, Skipped):
                skipped.append(result)
            elif store.save(result):
                on_cell()
    return skipped
