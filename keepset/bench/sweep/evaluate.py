"""`Evaluator`: asks the questions about a prompt of a cache that holds it, and measures each answer."""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from keepset.bench.analysis.diagnostics import repetition_rate
from keepset.bench.analysis.trace import EventFigures
from keepset.bench.generation import Answer, StopCriterion, Stream, likelihoods, picker
from keepset.bench.memory import CacheMemory
from keepset.bench.record import Record
from keepset.bench.sweep.prompts import EvalPrompt
from keepset.bench.sweep.scheduler import Streams
from keepset.bench.tasks.task import Reply, Task, Tokenizer
from keepset.hf.cache import Cache
from keepset.hf.prompt_session import CachedPrompt

TOGETHER = 8
"""The number of choices that are scored at once, each on a copy of the cache."""


class Evaluator:
    """Asks every cache the same questions.

    Args:
        model: the model.
        tokenizer: the model's.
        temperature: 0 for greedy decoding.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, temperature: float) -> None:
        self._model, self._tokenizer, self._temperature = model, tokenizer, temperature

    def ask(
        self,
        task: Task,
        prompt: EvalPrompt,
        draw: tuple[object, ...],
        first: int,
        cached: CachedPrompt,
        record: Record,
        answered: list[Record],
    ) -> Streams:
        """Ask every question about a cached prompt, which is used up.

        Args:
            task: judges the answers.
            prompt: the questions.
            draw: seeds the sampling, together with a question's number.
            first: the number, among the example's questions, of the prompt's first one.
            cached: the prompt in a cache.
            record: a record of the candidate without figures.
            answered: gets the record of each question, filled in.

        Yields:
            The answers that are to be decoded, one after another.
        """
        begun = CacheMemory(cached.cache, cached.is_full)
        decodes = task.decodes or cached.cache.schedule.every is not None
        ending = StopCriterion(self._model, self._tokenizer, task.generation)
        try:
            for number, question in enumerate(prompt.questions, first):
                used = cached.cache if question is prompt.questions[-1] else cached.cache.fork()
                memory = copy.copy(begun)
                events = EventFigures(used.recipe.method)
                used.observer = events.observe if decodes else None
                look = partial(_look, used, [memory, events] if decodes else [])
                look()
                try:
                    began, logits = time.perf_counter(), cached.logits
                    if question.ids:
                        ids = torch.tensor([question.ids], device=self._model.device)
                        with torch.no_grad():
                            options = {"past_key_values": used, "use_cache": True, "logits_to_keep": 1}
                            logits = self._model(ids, **options).logits[:, -1]
                        look()
                    if question.choices:
                        reply = likelihoods(self._model, used, logits, question.choices, TOGETHER)
                        answer = Answer(seconds=time.perf_counter() - began, reply=reply)
                    else:
                        pick = picker(self._temperature, logits.device, *draw, number)
                        answer = Answer(seconds=time.perf_counter() - began)
                        yield Stream(used, logits, pick, ending, look, answer)
                    if decodes:
                        memory.finish(used)
                finally:
                    used.stop_watching()
                figures = {
                    "keep": memory.keep,
                    "kv_bytes": memory.nbytes,
                    "kv_bytes_full": memory.nbytes_full,
                    "tokens": len(answer.ids),
                    "finished": float(answer.finished),
                    "repetition": repetition_rate(torch.tensor(answer.ids, dtype=torch.long)),
                    "prefill_seconds": cached.prefill_seconds,
                    "select_seconds": memory.select_seconds,
                    "decode_seconds": answer.seconds - (memory.select_seconds - begun.select_seconds),
                    "batch": answer.beside / len(answer.ids) if answer.ids else 1.0,
                    **events.means,
                }
                scores, replies = task.judge(question.question, answer.reply), [_plain(answer.reply)]
                answered.append(replace(record, scores=scores, figures=figures, replies=replies))
        finally:
            cached.cache.stop_watching()


def _look(cache: Cache, watchers: Sequence[CacheMemory | EventFigures]) -> None:
    for watcher in watchers:
        watcher.look(cache)


def _plain(reply: Reply) -> Any:
    """Return a reply as JSON can hold it: None in place of a likelihood that is not finite."""
    if isinstance(reply, str):
        return reply
    return [[likelihood if math.isfinite(likelihood) else None, greedy] for likelihood, greedy in reply]
