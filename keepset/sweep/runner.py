"""`Runner`: what every candidate makes of one example, all of them on one prefill of its context."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.compile.seen import refuse_seen
from keepset.diagnose.repetition import repetition_rate
from keepset.errors import KeepsetError
from keepset.evaluate.cell import Cell, Outcome
from keepset.evaluate.continuations import likelihoods
from keepset.hf.cache import Cache
from keepset.sweep.generation import Ending, Pick, generate, picker
from keepset.sweep.holding import Holding, kept
from keepset.sweep.plan import Candidate
from keepset.sweep.prefill import Prefill, Start
from keepset.sweep.prompts import Asked, Prompt, Prompts
from keepset.tasks.task import Example, Reply, Task

if TYPE_CHECKING:
    import transformers

TOGETHER = 8
"""Choices that are scored at once, each on a copy of the cache."""


class Runner:
    """Asks the same of every candidate, so that cells differ by nothing but the recipe.

    A prompt is prefilled once for all recipes that compress its end; recipes that compress while decoding (`every=`)
    have a prefill of their own. The first token of an answer is foretold by the whole prompt, as in `generate`;
    where a question follows a compressed context, by what was kept of it. Answers are the most likely tokens; with a
    temperature they are drawn from all tokens, by the seed, the example and the question alone, so that all candidates
    have the same luck. Whatever else the model's generation config says, other than what ends an answer, is left out.

    Args:
        model: a causal language model.
        tokenizer: the model's.
        agnostic: compress the context before any question is known, instead of context and question together.
        chat: ask in the model's chat template.
        temperature: 0 for greedy decoding.

    Raises:
        KeepsetError: the model has no chat template, or the temperature is out of range.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        agnostic: bool,
        chat: bool,
        temperature: float = 0.0,
    ) -> None:
        # Divided by less, logits overflow.
        if not (temperature == 0 or 0.01 <= temperature <= 100):
            raise KeepsetError(
                f"A temperature of {temperature} is out of range: use 0 for greedy decoding, or 0.01 to 100."
            )
        longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._prompts = Prompts(tokenizer, agnostic=agnostic, chat=chat, longest=longest)
        self._model, self._tokenizer, self._temperature = model, tokenizer, temperature

    def run(self, task: Task, example: Example, candidates: Sequence[Candidate], seed: int) -> Iterator[Cell]:
        """A cell for every candidate, in their order; what cannot be had is a cell with an error."""
        todo = [_unseen(candidate, example) for candidate in candidates]
        try:
            prompts = self._prompts.of(example, task.generation.tokens)
        except KeepsetError as error:
            yield from (_cell(task, example, replace(candidate, error=str(error)), seed, []) for candidate in todo)
            return
        if cut := max(prompt.cut for prompt in prompts):
            example = replace(example, facts={**example.facts, "cut": cut})
        outcomes: list[list[Outcome]] = [[] for _ in todo]
        for prompt in prompts:
            prefill = Prefill(self._model, torch.tensor([prompt.ids], device=self._model.device), todo)
            for index, candidate in enumerate(tuple(todo)):
                draw = seed, example.id, len(outcomes[index])
                try:
                    outcomes[index] += self._answers(task, prompt, prefill, candidate, draw)
                except KeepsetError as error:
                    todo[index] = replace(candidate, error=str(error))
                if prompt is prompts[-1]:
                    yield _cell(task, example, todo[index], seed, outcomes[index])

    def _answers(
        self, task: Task, prompt: Prompt, prefill: Prefill, candidate: Candidate, draw: tuple[int, str, int]
    ) -> list[Outcome]:
        """What becomes of each question of the prompt; `draw` says what the first one's luck depends on."""
        start = prefill.start(candidate)
        outcomes = []
        seed, example, first = draw
        try:
            for number, asked in enumerate(prompt.asked, first):
                cache = start.cache if asked is prompt.asked[-1] else start.cache.fork()
                pick = picker(self._temperature, start.logits.device, seed, example, number)
                try:
                    outcomes.append(self._answer(task, asked, start, cache, candidate.recipe is None, pick))
                finally:
                    cache.stop_watching()
        finally:
            start.cache.stop_watching()
        return outcomes

    def _answer(self, task: Task, asked: Asked, start: Start, cache: Cache, whole: bool, pick: Pick) -> Outcome:
        """One question, on a cache that is its own."""
        decodes = task.decodes or cache.schedule.every is not None
        held, keep, selected = Holding(cache, whole), kept(cache), _selecting(cache)
        began = time.perf_counter()
        ids: list[int] = []
        logits = self._say(cache, asked.ids) if asked.ids else start.logits
        if asked.choices:
            reply: Reply = likelihoods(self._model, cache, logits, asked.choices, TOGETHER)
            finished = True
        else:
            ending = Ending(self._model, self._tokenizer, task.generation)
            ids = generate(self._model, cache, logits, pick, ending, held.note if decodes else _nothing)
            reply, finished = ending.answer(ids)
        seconds = time.perf_counter() - began
        return Outcome(
            scores=task.judge(asked.question, reply),
            replies=[reply if isinstance(reply, str) else [_plain(*choice) for choice in reply]],
            keep=kept(cache) if decodes else keep,
            kv_bytes=held.nbytes,
            kv_bytes_full=held.nbytes_full,
            tokens=len(ids),
            finished=float(finished),
            repetition=repetition_rate(torch.tensor(ids, dtype=torch.long)),
            prefill_seconds=start.seconds,
            select_seconds=_selecting(cache),
            decode_seconds=seconds - (_selecting(cache) - selected),
        )

    @torch.no_grad()
    def _say(self, cache: Cache, ids: Sequence[int]) -> Float[Tensor, "1 vocabulary"]:
        """Feeds these tokens; gives what the last one foretells."""
        tokens = torch.tensor([ids], device=self._model.device)
        return self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


def _unseen(candidate: Candidate, example: Example) -> Candidate:
    """The candidate; with an error if its tables were compiled from this very text."""
    if candidate.recipe is None or candidate.error is not None:
        return candidate
    try:
        refuse_seen(candidate.recipe, "".join([example.context, *(question.text for question in example.questions)]))
    except KeepsetError as error:
        return replace(candidate, error=str(error))
    return candidate


def _selecting(cache: Cache) -> float:
    return sum(event.seconds for event in cache.events)


def _plain(likelihood: float, greedy: bool) -> list[float | bool | None]:
    """As JSON has it, which knows no number that overflowed."""
    return [likelihood if math.isfinite(likelihood) else None, greedy]


def _nothing() -> None:
    pass


def _cell(task: Task, example: Example, candidate: Candidate, seed: int, outcomes: Sequence[Outcome]) -> Cell:
    return Cell(
        task=task.name,
        seed=seed,
        example=example.id,
        recipe=candidate.text,
        method=candidate.method,
        requested=candidate.requested,
        facts=example.facts,
        metric=task.metric,
        outcome=_mean(outcomes) if candidate.error is None else None,
        error=candidate.error,
    )


def _mean(outcomes: Sequence[Outcome]) -> Outcome:
    """The means of all figures, and all replies."""

    def mean(name: str) -> float:
        return fmean(getattr(outcome, name) for outcome in outcomes)

    return Outcome(
        scores={name: fmean(outcome.scores[name] for outcome in outcomes) for name in outcomes[0].scores},
        replies=[reply for outcome in outcomes for reply in outcome.replies],
        keep=mean("keep"),
        kv_bytes=round(mean("kv_bytes")),
        kv_bytes_full=round(mean("kv_bytes_full")),
        tokens=mean("tokens"),
        finished=mean("finished"),
        repetition=mean("repetition"),
        prefill_seconds=mean("prefill_seconds"),
        select_seconds=mean("select_seconds"),
        decode_seconds=mean("decode_seconds"),
    )
