"""`Engine`: answers the questions of examples under every candidate, and returns a record of each."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from keepset.errors import KeepsetError
from keepset.hf.cache import Cache
from keepset.hf.prompt_session import CachedPrompt, PromptSession
from keepset.hf.second_pass import takes_task_tokens
from keepset.lab.analysis.events import EventFigures, repetition_rate
from keepset.lab.candidate import Candidate
from keepset.lab.compile.corpus import refuse_contaminated
from keepset.lab.generation import Answer, StopCriterion, likelihoods, picker
from keepset.lab.memory import CacheMemory, MemoryBudget, is_out_of_memory, most_tokens
from keepset.lab.record import Record, merged
from keepset.lab.sweep import chats
from keepset.lab.sweep.pool import MOST, Answers, Job, Pool
from keepset.lab.sweep.prompts import Asking, Prompt, PromptBuilder, TokenizedQuestion
from keepset.lab.tasks.chat import ChatTask
from keepset.lab.tasks.chat_example import ChatExample
from keepset.lab.tasks.task import Example, Reply, Task, Tokenizer
from keepset.models import context_length
from keepset.recipe import Recipe

TOGETHER = 8
"""The number of choices that are scored at once, each on a copy of the cache."""


@dataclass(frozen=True)
class Portion:
    """Cells to compute together: every candidate on every example.

    Candidates on one example share its prefill. The answers of one candidate to many examples, which may be long, are
    decoded side by side.

    Attributes:
        task: the task of the examples.
        examples: the examples, each under its seed.
        candidates: the candidates.
    """

    task: Task
    examples: Sequence[tuple[int, Example]]
    candidates: Sequence[Candidate]

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self.examples) * len(self.candidates)


@dataclass(frozen=True)
class Skipped:
    """Cells that could not be computed this time. They are not written, so the next run tries again."""

    task: str
    recipe: str
    reason: str


class Engine:
    """Asks every candidate the same questions, so that cells differ only in the recipe.

    The first token of an answer is predicted from the whole prompt, as in `generate`. If a question follows the
    compressed part, it is predicted from the kept entries. Answers are the most likely tokens. With a temperature they
    are drawn by the seed, the example and the question alone, so all candidates draw alike. Only the tokens that end an
    answer are taken from the model's generation config.

    Args:
        model: the model.
        tokenizer: the model's tokenizer.
        asking: how candidates are asked.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, asking: Asking) -> None:
        self._model, self._tokenizer, self._asking = model, tokenizer, asking
        self._longest, self._room = context_length(model), MemoryBudget(model.device)
        self._most = 1 if asking.alone else MOST

    def answer(self, portion: Portion) -> Iterator[Record | Skipped]:
        """Answer all questions of a portion under all of its candidates.

        Args:
            portion: examples and candidates. An example is tokenized and begun when there may be room for it.

        Yields:
            The record of every cell as soon as it is complete, the candidates of an example in their order. A candidate
            that cannot run has a record with an error; one for which memory was not enough is skipped.
        """
        if isinstance(portion.task, ChatTask):
            yield from self._chats(portion.task, portion)
            return
        builder = PromptBuilder(self._tokenizer, portion.task, self._asking, self._longest)
        jobs = (job for seed, example in portion.examples for job in self._jobs(portion, seed, example, builder))
        for job, records in Pool(self._model, self._room, jobs, self._most).run():
            cell = job.cell
            cell.end(records, job.peak_bytes)
            del job  # frees its cache before the next answers begin
            while cell.siblings and (result := cell.siblings[0].result) is not None:
                cell.siblings.popleft()
                yield result

    def _chats(self, task: ChatTask, portion: Portion) -> Iterator[Record | Skipped]:
        """Yield the cells of conversations, one after another: what is computed later depends on the candidate."""
        for (seed, example), candidate in product(portion.examples, portion.candidates):
            assert isinstance(example, ChatExample)
            cell = _blank(task, seed, example, candidate)
            try:
                if cell.error is None:
                    cell = chats.play(self._model, self._tokenizer, task, example, candidate, cell)
                yield cell
            except KeepsetError as error:
                yield replace(cell, error=str(error))
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                yield _out_of_memory(cell)

    def _jobs(self, portion: Portion, seed: int, example: Example, builder: PromptBuilder) -> Iterator[_Job]:
        """Yield a job for each candidate on one example; all of them share its prefills.

        Args:
            portion: the task and the candidates.
            seed: the example's seed.
            example: the example.
            builder: makes its prompts.
        """
        task, cells = portion.task, deque[_Cell]()
        cells.extend(_Cell(_blank(task, seed, example, c), c.recipe, cells) for c in portion.candidates)
        text = "".join([example.context, *(question.text for question in example.questions)])
        for task_aware, group in groupby(list(cells), self._is_task_aware):
            sharing, prompts = list(group), list[Prompt]()
            for cell in sharing:
                cell.check(lambda recipe: refuse_contaminated(recipe, text))
            try:
                prompts = builder.of(example, task_aware=task_aware)
            except KeepsetError as error:
                for cell in sharing:
                    cell.fail(error)
            cut = max((prompt.cut for prompt in prompts), default=0)
            for cell in sharing:
                cell.check(lambda recipe: Cache(self._model, recipe).stop_watching())
                cell.record = replace(cell.record, facts={**example.facts, "cut": cut} if cut else example.facts)
            recipes = [cell.recipe for cell in sharing if cell.recipe is not None and cell.record.error is None]
            shared = [recipe for recipe in recipes if recipe.schedule.every is None]
            sessions = [partial(self._session, prompt, shared) for prompt in prompts]
            if len(sharing) > 1:
                sessions = [cache(session) for session in sessions]
            for cell in sharing:
                sizes = (_most_tokens(cell.recipe, prompt, task.generation.tokens) for prompt in prompts)
                begin = partial(self._ask, cell, task, list(zip(prompts, sessions, strict=True)))
                yield _Job(begin, max(sizes, default=0), cell=cell)

    def _is_task_aware(self, cell: _Cell) -> bool:
        """Return whether a candidate uses a task's tokens and gets some."""
        mode, recipe = self._asking.mode, cell.recipe
        return mode == "task" and recipe is not None and takes_task_tokens(recipe.method.traits.needs)

    def _session(self, prompt: Prompt, recipes: Sequence[Recipe]) -> PromptSession:
        ids, *tasks = (
            torch.tensor([tokens], dtype=torch.long, device=self._model.device)
            for tokens in (prompt.ids, *prompt.tasks)
        )
        return PromptSession(self._model, ids, recipes, task_tokens=tasks)

    def _ask(self, cell: _Cell, task: Task, prompts: Sequence[tuple[Prompt, Callable[[], PromptSession]]]) -> Answers:
        records = list[Record]()
        try:
            for prompt, session in prompts if cell.record.error is None else ():
                records += yield from self._ask_about(cell, task, prompt, session, len(records))
        except KeepsetError as error:
            cell.fail(error)
        return records

    def _ask_about(
        self, cell: _Cell, task: Task, prompt: Prompt, session: Callable[[], PromptSession], first: int
    ) -> Answers:
        """Ask every question about a prompt.

        Args:
            cell: the cell.
            task: the task.
            prompt: the prompt.
            session: returns the prefill.
            first: the number of the prompt's first question among the example's.
        """
        recipe, records = cell.recipe, list[Record]()
        if recipe is not None and recipe.schedule.every is not None:
            cached = session().compress_alone(recipe)
        else:
            cached = session().compress(recipe)
        try:
            for number, question in enumerate(prompt.questions, first):
                is_last = question is prompt.questions[-1]
                used = cached.cache if is_last else cached.cache.fork()
                records.append((yield from self._reply(cell.record, task, question, number, cached, used)))
        finally:
            cached.cache.stop_watching()
        return records

    def _reply(
        self, blank: Record, task: Task, question: TokenizedQuestion, number: int, cached: CachedPrompt, used: Cache
    ) -> Generator[Answer, None, Record]:
        """Ask one question; yield the answer if it is to be decoded.

        Args:
            blank: the cell without figures.
            task: the task.
            question: the question.
            number: its number among the example's.
            cached: the prompt, whose cache may have other forks.
            used: its cache or a fork, which is used up.
        """
        recompresses = used.schedule.every is not None
        decodes = task.decodes or recompresses
        memory = CacheMemory(cached.cache, cached.is_full)
        events = EventFigures(used.recipe.method) if recompresses else None
        selected_before = memory.select_seconds
        if events is not None:
            used.observer = events.observe

        def look() -> None:
            if decodes:
                memory.look(used)
            if events is not None:
                events.look(used)

        look()
        try:
            began, logits = time.perf_counter(), cached.logits
            if question.ids:
                logits = self._read(question.ids, used)
                look()
            pick = picker(self._asking.temperature, logits.device, blank.seed, blank.example, number)
            ending = StopCriterion(self._model, self._tokenizer, task.generation)
            answer = Answer(used, logits, pick, ending, look)
            if question.choices:
                answer.reply = likelihoods(self._model, used, logits, question.choices, TOGETHER)
            answer.seconds = time.perf_counter() - began
            if not question.choices:
                yield answer
            if decodes:
                memory.finish(used)
        finally:
            used.stop_watching()
        figures = {
            "keep": memory.keep,
            "share": memory.share,
            "kv_bytes": memory.nbytes,
            "kv_bytes_full": memory.nbytes_full,
            "tokens": len(answer.ids),
            "finished": float(answer.finished),
            "repetition": repetition_rate(torch.tensor(answer.ids, dtype=torch.long)),
            "prefill_seconds": cached.prefill_seconds,
            "select_seconds": memory.select_seconds,
            "decode_seconds": answer.seconds - (memory.select_seconds - selected_before),
            "batch": answer.beside / len(answer.ids) if answer.ids else 1.0,
            **({} if events is None else events.means),
        }
        scores = task.judge(question.question, answer.reply)
        return replace(blank, scores=scores, figures=figures, replies=[_plain(answer.reply)])

    @torch.no_grad()
    def _read(self, ids: Sequence[int], cache: Cache) -> Float[Tensor, "1 vocabulary"]:
        batch = torch.tensor([ids], dtype=torch.long, device=self._model.device)
        return self._model(batch, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


@dataclass(eq=False)
class _Cell:
    """A cell that is being computed.

    Attributes:
        record: the cell without figures.
        recipe: the candidate's recipe; None for the full cache.
        siblings: the example's cells that are not complete or wait for others, in the order of candidates.
        result: the complete cell; None before.
    """

    record: Record
    recipe: Recipe | None
    siblings: deque[_Cell]
    result: Record | Skipped | None = None

    def fail(self, error: KeepsetError) -> None:
        """Note an error, if it is the cell's first."""
        if self.record.error is None:
            self.record = replace(self.record, error=str(error))

    def check(self, check: Callable[[Recipe], None]) -> None:
        """Check the recipe, and note the error."""
        if self.record.error is None and self.recipe is not None:
            try:
                check(self.recipe)
            except KeepsetError as error:
                self.fail(error)

    def end(self, answered: Sequence[Record] | None, peak_bytes: int | None) -> None:
        """Make the cell of its questions' records.

        Args:
            answered: a record for each question; None if memory was not enough.
            peak_bytes: the most bytes that the device had allocated; None if unknown.
        """
        if answered is None:
            self.result = _out_of_memory(self.record)
        elif self.record.error is not None:
            self.result = self.record
        else:
            cell = merged(answered)
            peak = {} if peak_bytes is None else {"peak_bytes": peak_bytes}
            self.result = replace(cell, figures={**cell.figures, **peak})


@dataclass(eq=False, kw_only=True)
class _Job(Job):
    """The answers of a cell."""

    cell: _Cell


def _most_tokens(recipe: Recipe | None, prompt: Prompt, answer: int) -> int:
    """Return the most tokens whose entries a cache holds at any time.

    Args:
        recipe: the recipe; None for the full cache.
        prompt: the prompt with its questions.
        answer: the most tokens of an answer.
    """
    after = max(len(question.ids) for question in prompt.questions) + answer
    # During compression a prompt is in memory twice.
    return max(most_tokens(recipe, len(prompt.ids), after), 2 * len(prompt.ids))


def _out_of_memory(cell: Record) -> Skipped:
    return Skipped(cell.task, cell.recipe, "memory was not enough")


def _blank(task: Task, seed: int, example: Example, candidate: Candidate) -> Record:
    return Record(
        task=task.name,
        seed=seed,
        example=example.id,
        recipe=candidate.text,
        method=candidate.method,
        requested=candidate.requested,
        facts=example.facts,
        metric=task.metric,
        error=candidate.error,
    )


def _plain(reply: Reply) -> Any:
    """Return a reply in JSON's types: None in place of a likelihood that is not finite."""
    if isinstance(reply, str):
        return reply
    return [[likelihood if math.isfinite(likelihood) else None, greedy] for likelihood, greedy in reply]
