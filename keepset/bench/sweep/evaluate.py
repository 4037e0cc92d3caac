"""`Evaluator`: puts a prompt's questions to caches that hold it, and says what became of each."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from keepset.bench.analysis.diagnostics import repetition_rate
from keepset.bench.analysis.event_figures import EventFigures
from keepset.bench.cell import Outcome
from keepset.bench.generation import Answer, Ending, generate, likelihoods, picker
from keepset.bench.memory import CacheMemory
from keepset.bench.sweep.prompts import Prompt, TokenizedQuestion
from keepset.bench.tasks.task import Reply, Task, Tokenizer
from keepset.hf.cache import Cache
from keepset.hf.join import join
from keepset.hf.prompt_session import CachedPrompt

TOGETHER = 8
"""Choices that are scored at once, each on a copy of the cache."""


class Evaluator:
    """Asks the same of every cache, greedily if the temperature is 0."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, temperature: float) -> None:
        self._model, self._tokenizer, self._temperature = model, tokenizer, temperature

    def evaluate(
        self, task: Task, prompt: Prompt, draw: tuple[object, ...], first: int, cached: Sequence[CachedPrompt]
    ) -> list[list[Outcome]]:
        """What becomes of each question, for each of the cached prompts, which are used up.

        Several are asked as a batch: questions with choices, and caches that cannot join others, come alone. All luck
        depends on `draw` and the question's number among the example's, which for the prompt's first is `first`.
        """
        begun = [CacheMemory(each.cache, each.is_full) for each in cached]
        decodes = task.decodes or cached[0].cache.schedule.every is not None
        cache = join([each.cache for each in cached])
        outcomes: list[list[Outcome]] = [[] for _ in cached]
        try:
            for number, question in enumerate(prompt.questions, first):
                used = cache if question is prompt.questions[-1] else cache.fork()
                memories = [copy.copy(memory) for memory in begun]
                events = EventFigures()
                look = partial(_look, used, [memories[0], events] if decodes else [])
                look()
                try:
                    answers = self._answers(task, question, cached, used, look, (*draw, number))
                    if decodes:
                        memories[0].finish(used)
                finally:
                    used.stop_watching()
                for row, (answer, memory) in enumerate(zip(answers, memories, strict=True)):
                    outcomes[row].append(
                        Outcome(
                            scores=task.judge(question.question, answer.reply),
                            replies=[_plain(answer.reply)],
                            keep=memory.keep,
                            kv_bytes=memory.nbytes,
                            kv_bytes_full=memory.nbytes_full,
                            tokens=len(answer.ids),
                            finished=float(answer.finished),
                            repetition=repetition_rate(torch.tensor(answer.ids, dtype=torch.long)),
                            prefill_seconds=cached[row].prefill_seconds,
                            select_seconds=memory.select_seconds,
                            decode_seconds=answer.seconds - (memory.select_seconds - begun[row].select_seconds),
                            **events.means,
                        )
                    )
        finally:
            cache.stop_watching()
        return outcomes

    @torch.no_grad()
    def _answers(
        self,
        task: Task,
        question: TokenizedQuestion,
        cached: Sequence[CachedPrompt],
        cache: Cache,
        look: Callable[[], None],
        draw: tuple[object, ...],
    ) -> list[Answer]:
        """To one question, on a cache that is its own; `look` is called whenever the cache has grown."""
        began = time.perf_counter()
        if question.ids:
            ids = torch.tensor([question.ids] * len(cached), device=self._model.device)
            logits = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            look()
        else:
            logits = torch.cat([each.logits for each in cached])
        if question.choices:
            reply = likelihoods(self._model, cache, logits, question.choices, TOGETHER)
            return [Answer(seconds=time.perf_counter() - began, reply=reply)]
        question_seconds = (time.perf_counter() - began) / len(cached)
        ending = Ending(self._model, self._tokenizer, task.generation)
        # One each: all have the same luck.
        picks = [picker(self._temperature, logits.device, *draw) for _ in cached]
        answers = generate(self._model, cache, logits, picks, ending, look)
        for answer in answers:
            answer.seconds += question_seconds
        return answers


def _look(cache: Cache, watchers: Sequence[CacheMemory | EventFigures]) -> None:
    for watcher in watchers:
        watcher.look(cache)


def _plain(reply: Reply) -> Any:
    """As JSON has it, which knows no number that overflowed."""
    if isinstance(reply, str):
        return reply
    return [[likelihood if math.isfinite(likelihood) else None, greedy] for likelihood, greedy in reply]
