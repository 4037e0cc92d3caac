"""`Runner`: computes cells: all candidates of an example on one prefill, or one candidate on many examples at once."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
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
from keepset.lab.compile.contamination import refuse_contaminated
from keepset.lab.generation import Answer, StopCriterion, Stream, likelihoods, picker
from keepset.lab.memory import CacheMemory, MemoryBudget, most_tokens
from keepset.lab.record import Record, merged
from keepset.lab.sweep.prompts import EvalPrompt, Mode, PromptBuilder
from keepset.lab.sweep.scheduler import MOST, Scheduler, Streams
from keepset.lab.tasks.task import Example, Reply, Task, Tokenizer
from keepset.recipe import Recipe

TOGETHER = 8
"""The number of choices that are scored at once, each on a copy of the cache."""


class Runner:
    """Asks every candidate the same questions, so that cells differ only in the recipe.

    The first token of an answer is predicted from the whole prompt, as in `generate`. If a question follows the
    compressed part, it is predicted from the kept entries. Answers are the most likely tokens. With a temperature they
    are drawn by the seed, the example and the question alone, so all candidates draw alike. Only the tokens that end an
    answer are taken from the model's generation config.

    Args:
        model: the model.
        tokenizer: the model's tokenizer.
        mode: which part is compressed, and whether the questions are known by then.
        chat: whether prompts are chats.
        temperature: 0 for greedy decoding, or 0.01 to 100.
        alone: whether answers are decoded one by one, so that seconds and memory belong to a single answer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        mode: Mode,
        chat: bool,
        temperature: float = 0.0,
        alone: bool = False,
    ) -> None:
        longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        prompts = partial(PromptBuilder, tokenizer, mode=mode, longest=longest)
        self._mode, self._verbatim = mode, prompts(chat=False)
        self._chat = prompts(chat=True) if chat else self._verbatim
        self._model, self._tokenizer, self._temperature = model, tokenizer, temperature
        self._room, self._most = MemoryBudget(model.device), 1 if alone else MOST

    def run(self, task: Task, example: Example, candidates: Sequence[Candidate], seed: int) -> Iterator[Record]:
        """Yield a cell for every candidate of one example, in order; one that cannot run has an error.

        Raises:
            MemoryError: memory was not enough for the next candidate; also PyTorch's errors of this kind.
        """
        runs = [CellRun(task, seed, example, candidate) for candidate in candidates]
        for task_aware, together in groupby(runs, self._is_task_aware):
            yield from self._share(list(together), task_aware)

    def decode(self, runs: Iterable[CellRun]) -> Iterator[tuple[CellRun, Record | None]]:
        """Compute several cells at once; the next one is taken when there may be room for it.

        Yields:
            Each run with its cell, in the order in which they end; None if memory was not enough.
        """

        def job(run: CellRun) -> Job:
            prompts = self._begin([run], self._is_task_aware(run))
            recipes = [] if run.recipe is None else [run.recipe]
            return self._job(run, prompts, 0, lambda prompt: self._session(prompt, recipes))

        for done, error in Scheduler(self._model, self._room, map(job, runs), self._most).run():
            yield done.run, None if error is not None else done.run.cell()

    def _share(self, runs: Sequence[CellRun], task_aware: bool) -> Iterator[Record]:
        """Compute the cells of candidates that share their prefills."""
        prompts, questions, left = self._begin(runs, task_aware), 0, list(runs)
        for prompt in prompts:
            recipes = [run.recipe for run in runs if run.error is None and run.recipe is not None]
            session = self._session(prompt, [recipe for recipe in recipes if recipe.schedule.every is None])
            jobs = [self._job(run, [prompt], questions, lambda _, session=session: session) for run in runs]
            done = set[CellRun]()
            for job, error in Scheduler(self._model, self._room, iter(jobs), self._most).run():
                if error is not None:
                    raise error
                done.add(job.run)
                while prompt is prompts[-1] and left and left[0] in done:
                    yield left.pop(0).cell()
            questions += len(prompt.questions)
        for run in left:
            yield run.cell()

    def _is_task_aware(self, run: CellRun) -> bool:
        """Return whether a candidate uses a task's tokens and gets some."""
        return self._mode == "task" and run.recipe is not None and takes_task_tokens(run.recipe.method.traits.needs)

    def _begin(self, runs: Sequence[CellRun], task_aware: bool) -> list[EvalPrompt]:
        """Return an example's prompts; note the error in every run if there are none."""
        task, example = runs[0].task, runs[0].example
        text = "".join([example.context, *(question.text for question in example.questions)])
        for run in runs:
            run.check(lambda recipe: refuse_contaminated(recipe, text))
        try:
            prompts = (self._chat if task.chat else self._verbatim).of(
                example, task.generation.tokens, task_aware=task_aware
            )
        except KeepsetError as error:
            for run in runs:
                run.error = run.error or str(error)
            return []
        for run in runs:
            run.check(lambda recipe: Cache(self._model, recipe).stop_watching())
            run.cut = max(prompt.cut for prompt in prompts)
        return prompts

    def _session(self, prompt: EvalPrompt, recipes: Sequence[Recipe]) -> PromptSession:
        ids, *tasks = (
            torch.tensor([tokens], dtype=torch.long, device=self._model.device)
            for tokens in (prompt.ids, *prompt.tasks)
        )
        return PromptSession(self._model, ids, recipes, task_tokens=tasks)

    def _job(
        self, run: CellRun, prompts: Sequence[EvalPrompt], first: int, session: Callable[[EvalPrompt], PromptSession]
    ) -> Job:
        answer, tokens = run.task.generation.tokens, 0
        for prompt in prompts:
            after = max(len(question.ids) + answer for question in prompt.questions)
            # During compression a prompt is in memory twice.
            tokens = max(tokens, most_tokens(run.recipe, len(prompt.ids), after), 2 * len(prompt.ids))
        return Job(self, run, prompts, first, session, tokens)

    def ask(
        self, run: CellRun, prompt: EvalPrompt, first: int, cached: CachedPrompt, answered: list[Record]
    ) -> Streams:
        """Ask every question about a cached prompt, which is consumed; yield the answers to decode.

        `first` is the number of the prompt's first question among the example's. `answered` gets the records.
        """
        task = run.task
        begun = CacheMemory(cached.cache, cached.is_full)
        recompresses = cached.cache.schedule.every is not None
        decodes = task.decodes or recompresses
        ending = StopCriterion(self._model, self._tokenizer, task.generation)
        try:
            for number, question in enumerate(prompt.questions, first):
                used = cached.cache if question is prompt.questions[-1] else cached.cache.fork()
                memory = copy.copy(begun)
                watchers: list[CacheMemory | EventFigures] = [memory] if decodes else []
                events = EventFigures(used.recipe.method) if recompresses else None
                if events is not None:
                    used.observer = events.observe
                    watchers.append(events)
                look = partial(_look, used, watchers)
                look()
                try:
                    began, logits = time.perf_counter(), cached.logits
                    if question.ids:
                        logits = self._read(question.ids, used)
                        look()
                    if question.choices:
                        reply = likelihoods(self._model, used, logits, question.choices, TOGETHER)
                        answer = Answer(seconds=time.perf_counter() - began, reply=reply)
                    else:
                        pick = picker(self._temperature, logits.device, run.seed, run.example.id, number)
                        answer = Answer(seconds=time.perf_counter() - began)
                        yield Stream(used, logits, pick, ending, look, answer)
                    if decodes:
                        memory.finish(used)
                finally:
                    used.stop_watching()
                figures = _figures(answer, memory, cached.prefill_seconds, memory.select_seconds - begun.select_seconds)
                figures |= {} if events is None else events.means
                scores, replies = task.judge(question.question, answer.reply), [_plain(answer.reply)]
                answered.append(replace(run.record(), scores=scores, figures=figures, replies=replies))
        finally:
            cached.cache.stop_watching()

    @torch.no_grad()
    def _read(self, ids: Sequence[int], cache: Cache) -> Float[Tensor, "1 vocabulary"]:
        """Add tokens to a cache; return the logits after the last of them."""
        batch = torch.tensor([ids], dtype=torch.long, device=self._model.device)
        return self._model(batch, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


@dataclass(eq=False)
class CellRun:
    """One cell to compute: a candidate, an example of a task, and a seed; and its results so far."""

    task: Task
    seed: int
    example: Example
    candidate: Candidate
    error: str | None = field(init=False)
    answered: list[Record] = field(init=False, default_factory=list)
    cut: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.error = self.candidate.error

    @property
    def recipe(self) -> Recipe | None:
        """The candidate's recipe; None for the full cache."""
        return self.candidate.recipe

    def check(self, check: Callable[[Recipe], None]) -> None:
        """Check the recipe, and note the error if it is the run's first."""
        if self.error is None and self.recipe is not None:
            try:
                check(self.recipe)
            except KeepsetError as error:
                self.error = str(error)

    def cell(self) -> Record:
        """Return the cell."""
        return merged(self.answered) if self.error is None else self.record()

    def record(self) -> Record:
        """Return the cell without figures."""
        return Record(
            task=self.task.name,
            seed=self.seed,
            example=self.example.id,
            recipe=self.candidate.text,
            method=self.candidate.method,
            requested=self.candidate.requested,
            facts={**self.example.facts, "cut": self.cut} if self.cut else self.example.facts,
            metric=self.task.metric,
            error=self.error,
        )


@dataclass(eq=False)
class Job:
    """Some of an example's prompts for one candidate.

    Attributes:
        first: the number of their first question.
        tokens: the most tokens whose entries its cache holds at any time, including its start.
        peak_bytes: the most bytes that the device had allocated in a call for it; None if that is not measured.
    """

    runner: Runner
    run: CellRun
    prompts: Sequence[EvalPrompt]
    first: int
    session: Callable[[EvalPrompt], PromptSession]
    tokens: int
    peak_bytes: int | None = None

    def streams(self) -> Streams:
        """Yield the answers, and note each question's record. Each is decoded to its end before the next is requested.

        A second call starts over. An error of an answer is thrown into the generator, unless memory ran out.
        """
        answered = list[Record]()
        if self.run.error is not None:
            return
        try:
            for prompt in self.prompts:
                number = self.first + len(answered)
                yield from self.runner.ask(self.run, prompt, number, self._cached(prompt), answered)
        except KeepsetError as error:
            self.run.error = str(error)
        peak = {} if self.peak_bytes is None else {"peak_bytes": self.peak_bytes}
        self.run.answered += [replace(record, figures={**record.figures, **peak}) for record in answered]

    def _cached(self, prompt: EvalPrompt) -> CachedPrompt:
        recipe = self.run.recipe
        if recipe is None or recipe.schedule.every is None:
            return self.session(prompt).compress(recipe)
        return self.session(prompt).compress_alone(recipe)


def _figures(answer: Answer, memory: CacheMemory, prefill_seconds: float, selecting: float) -> dict[str, Any]:
    """Return an answer's costs by the names of records; `selecting` is the seconds of events during its decoding."""
    return {
        "keep": memory.keep,
        "share": memory.share,
        "kv_bytes": memory.nbytes,
        "kv_bytes_full": memory.nbytes_full,
        "tokens": len(answer.ids),
        "finished": float(answer.finished),
        "repetition": repetition_rate(torch.tensor(answer.ids, dtype=torch.long)),
        "prefill_seconds": prefill_seconds,
        "select_seconds": memory.select_seconds,
        "decode_seconds": answer.seconds - selecting,
        "batch": answer.beside / len(answer.ids) if answer.ids else 1.0,
    }


def _look(cache: Cache, watchers: Sequence[CacheMemory | EventFigures]) -> None:
    for watcher in watchers:
        watcher.look(cache)


def _plain(reply: Reply) -> Any:
    """Return a reply in JSON's types: None in place of a likelihood that is not finite."""
    if isinstance(reply, str):
        return reply
    return [[likelihood if math.isfinite(likelihood) else None, greedy] for likelihood, greedy in reply]
