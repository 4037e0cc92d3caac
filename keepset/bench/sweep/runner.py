"""`Runner`: what every candidate makes of one example, all of them on one prefill of its context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from keepset.bench.candidate import Candidate
from keepset.bench.cell import Cell, Outcome, means
from keepset.bench.memory import is_out_of_memory, nbytes_full
from keepset.bench.sweep.evaluate import Evaluator
from keepset.bench.sweep.prompts import Mode, Prompts
from keepset.bench.tasks.task import Example, Task, Tokenizer
from keepset.errors import KeepsetError
from keepset.hf.cache import Cache
from keepset.hf.join import can_join
from keepset.hf.prompt_session import CachedPrompt, PromptSession
from keepset.hf.second_pass import takes_task_tokens
from keepset.offline.compile.contamination import refuse_contaminated
from keepset.recipe import Recipe

TOGETHER = 4
"""As many full caches may be held by candidates that are asked as a batch."""


class Runner:
    """Asks the same of every candidate, so that cells differ by nothing but the recipe.

    The mode says what is compressed, and what is known by then. The first token of an answer is predicted by the whole
    prompt, as in `generate`; where something follows what was compressed, by what was kept of it. Answers are the most
    likely tokens; with a temperature they are drawn by the seed, the example and the question alone, so that all
    candidates have the same luck. Of the model's generation config only what ends an answer counts.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, *, mode: Mode, chat: bool, temperature: float = 0.0
    ) -> None:
        # Divided by less, logits overflow.
        if not (temperature == 0 or 0.01 <= temperature <= 100):
            raise KeepsetError(
                f"A temperature of {temperature} is out of range: use 0 for greedy decoding, or 0.01 to 100."
            )
        longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        prompts = partial(Prompts, tokenizer, mode=mode, longest=longest)
        self._mode, self._verbatim = mode, prompts(chat=False)
        self._chat = prompts(chat=True) if chat else self._verbatim
        self._model, self._evaluator = model, Evaluator(model, tokenizer, temperature)

    def run(self, task: Task, example: Example, candidates: Sequence[Candidate], seed: int) -> Iterator[Cell]:
        """A cell for every candidate, in their order; what cannot be had is a cell with an error."""
        runs = [_Run(candidate, candidate.error) for candidate in candidates]
        text = "".join([example.context, *(question.text for question in example.questions)])
        for run in runs:
            run.check(lambda recipe: refuse_contaminated(recipe, text))
        for told, together in groupby(runs, lambda run: self._mode == "task" and run.can_be_told):
            yield from self._share(task, example, list(together), seed, told)

    def _share(self, task: Task, example: Example, runs: Sequence[_Run], seed: int, told: bool) -> Iterator[Cell]:
        """The cells of candidates that share their prefills."""
        try:
            prompts = (self._chat if task.chat else self._verbatim).of(example, task.generation.tokens, told=told)
        except KeepsetError as error:
            for run in runs:
                run.fail(error)
                yield run.cell(task, example, seed)
            return
        for run in runs:
            run.check(lambda recipe: Cache(self._model, recipe).stop_watching())
        if cut := max(prompt.cut for prompt in prompts):
            example = replace(example, facts={**example.facts, "cut": cut})
        questions = 0
        for prompt in prompts:
            ids = torch.tensor([prompt.ids], device=self._model.device)
            sharing = [run.candidate.recipe for run in runs if run.error is None and run.every is None]
            tasks = [torch.tensor([tokens], device=self._model.device) for tokens in prompt.tasks]
            needed = [recipe for recipe in sharing if recipe is not None]
            session = PromptSession(self._model, ids, needed, task_tokens=tasks)
            evaluate = partial(self._evaluator.evaluate, task, prompt, (seed, example.id), questions)
            batched = not task.decodes and not any(question.choices for question in prompt.questions)
            for group in _groups(session, runs, batched):
                _evaluate(evaluate, session, group)
                if prompt is prompts[-1]:
                    yield from (run.cell(task, example, seed) for run in group)
            questions += len(prompt.questions)


@dataclass
class _Run:
    """A candidate on one example, and what has become of it so far."""

    candidate: Candidate
    error: str | None
    outcomes: list[Outcome] = field(default_factory=list)
    cached: CachedPrompt | None = None

    @property
    def every(self) -> int | None:
        """After how many tokens it compresses again while decoding."""
        return None if self.candidate.recipe is None else self.candidate.recipe.schedule.every

    @property
    def can_be_told(self) -> bool:
        """Whether its recipe looks at tokens of a task where it is given some."""
        return self.candidate.recipe is not None and takes_task_tokens(self.candidate.recipe.method.needs)

    def check(self, check: Callable[[Recipe], None]) -> None:
        """Whether the recipe passes."""
        if self.error is None and self.candidate.recipe is not None:
            with self._failing():
                check(self.candidate.recipe)

    def begin(self, session: PromptSession) -> None:
        """Caches the prompt its way, unless it has or cannot."""
        if self.cached is None and self.error is None:
            recipe = self.candidate.recipe
            with self._failing():
                if recipe is None or recipe.schedule.every is None:
                    self.cached = session.compress(recipe)
                else:
                    self.cached = session.compress_alone(recipe)

    def hand_over(self) -> CachedPrompt:
        """What it has begun, which is somebody else's now: the cache goes as soon as it is used up."""
        assert self.cached is not None
        cached, self.cached = self.cached, None
        return cached

    def fail(self, error: KeepsetError) -> None:
        """It cannot be had: the first reason stays."""
        self.error = self.error or str(error)

    def cell(self, task: Task, example: Example, seed: int) -> Cell:
        """What came of it."""
        return Cell(
            task=task.name,
            seed=seed,
            example=example.id,
            recipe=self.candidate.text,
            method=self.candidate.method,
            requested=self.candidate.requested,
            facts=example.facts,
            metric=task.metric,
            outcome=_mean(self.outcomes) if self.error is None else None,
            error=self.error,
        )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except KeepsetError as error:
            self.fail(error)


def _groups(session: PromptSession, runs: Sequence[_Run], batched: bool) -> Iterator[list[_Run]]:
    """All of them, begun: neighbours together where they may be asked as a batch and do not hold too much."""
    group: list[_Run] = []
    for run in runs:
        alone = not batched or run.every is not None
        if group and (alone or not _joins(run, group, session)):
            yield group
            group = []
        run.begin(session)
        group.append(run)
    if group:
        yield group


def _joins(run: _Run, group: Sequence[_Run], session: PromptSession) -> bool:
    """Whether a group can be asked together with others, and this one begins beside it without holding too much."""
    held = [other.cached.cache for other in group if other.cached is not None]
    if not all(map(can_join, held)):
        return False
    try:
        run.begin(session)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    if run.cached is None:  # what cannot be had is no burden
        return True
    cache = run.cached.cache
    return sum((other.nbytes for other in held), cache.nbytes) <= TOGETHER * nbytes_full(cache)


def _evaluate(
    evaluate: Callable[[Sequence[CachedPrompt]], list[list[Outcome]]], session: PromptSession, group: Sequence[_Run]
) -> None:
    """Evaluates all that have begun; one after another if one spoils it for the others, or memory is not enough."""
    begun = [run for run in group if run.cached is not None]
    if not begun:
        return
    try:
        for run, outcomes in zip(begun, evaluate([run.hand_over() for run in begun]), strict=True):
            run.outcomes += outcomes
        return
    except KeepsetError as error:
        if len(begun) == 1:
            return begun[0].fail(error)
    except (MemoryError, RuntimeError) as error:
        if len(begun) == 1 or not is_out_of_memory(error):
            raise
    for run in begun:
        run.begin(session)
        _evaluate(evaluate, session, [run])


def _mean(outcomes: Sequence[Outcome]) -> Outcome:
    costs: dict[str, Any] = means(outcomes)
    for name in ("kv_bytes", "kv_bytes_full"):
        costs[name] = round(costs[name])
    return Outcome(
        scores={name: fmean(outcome.scores[name] for outcome in outcomes) for name in outcomes[0].scores},
        replies=[reply for outcome in outcomes for reply in outcome.replies],
        **costs,
    )
