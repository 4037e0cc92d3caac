"""`Asker`: puts a prompt's questions to caches that hold it, and says what became of each."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.bench.analysis.repetition import repetition_rate
from keepset.bench.cell import Outcome
from keepset.bench.continuations import likelihoods
from keepset.bench.sweep.generation import Ending, Said, generate, picker
from keepset.bench.sweep.holding import Holding
from keepset.bench.sweep.prefill import Start
from keepset.bench.sweep.prompts import Asked, Prompt
from keepset.bench.tasks.task import Reply, Task
from keepset.hf.cache import Cache
from keepset.hf.join import join

if TYPE_CHECKING:
    import transformers

TOGETHER = 8
"""Choices that are scored at once, each on a copy of the cache."""


class Asker:
    """Asks the same of every cache.

    Args:
        temperature: 0 for greedy decoding.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerBase,
        temperature: float,
    ) -> None:
        self._model, self._tokenizer, self._temperature = model, tokenizer, temperature

    def ask(
        self, task: Task, prompt: Prompt, draw: tuple[object, ...], first: int, starts: Sequence[Start]
    ) -> list[list[Outcome]]:
        """What becomes of each question, for each of the starts, whose caches are used up.

        Several are asked as a batch: questions with choices, and caches that cannot join others, come alone.

        Args:
            draw: what all luck depends on, beside the question's number among the example's.
            first: that of the prompt's first question.
        """
        held = [Holding(start.cache, start.whole) for start in starts]
        decodes = task.decodes or starts[0].cache.schedule.every is not None
        cache = join([start.cache for start in starts])
        outcomes: list[list[Outcome]] = [[] for _ in starts]
        try:
            for number, asked in enumerate(prompt.asked, first):
                used = cache if asked is prompt.asked[-1] else cache.fork()
                after = [copy.copy(holding) for holding in held]
                look = partial(after[0].look, used) if decodes else _nothing
                try:
                    answers = self._answers(task, asked, starts, used, look, (*draw, number))
                    if decodes:
                        after[0].finish(used)
                finally:
                    used.stop_watching()
                for row, answer in enumerate(answers):
                    selecting = after[row].select_seconds - held[row].select_seconds
                    outcomes[row].append(
                        Outcome(
                            scores=task.judge(asked.question, answer.reply),
                            replies=[_plain(answer.reply)],
                            keep=after[row].keep,
                            kv_bytes=after[row].nbytes,
                            kv_bytes_full=after[row].nbytes_full,
                            tokens=len(answer.said.ids),
                            finished=float(answer.finished),
                            repetition=repetition_rate(torch.tensor(answer.said.ids, dtype=torch.long)),
                            prefill_seconds=starts[row].seconds,
                            select_seconds=after[row].select_seconds,
                            decode_seconds=answer.said.seconds - selecting,
                        )
                    )
        finally:
            cache.stop_watching()
        return outcomes

    def _answers(
        self,
        task: Task,
        asked: Asked,
        starts: Sequence[Start],
        cache: Cache,
        look: Callable[[], None],
        draw: tuple[object, ...],
    ) -> list[_Answer]:
        """To one question, on a cache that is its own; `look` is called whenever the cache has grown."""
        began = time.perf_counter()
        if asked.ids:
            logits = self._say(cache, [asked.ids] * len(starts))
            look()
        else:
            logits = torch.cat([start.logits for start in starts])
        if asked.choices:
            reply = likelihoods(self._model, cache, logits, asked.choices, TOGETHER)
            return [_Answer(reply, True, Said(seconds=time.perf_counter() - began))]
        heard = (time.perf_counter() - began) / len(starts)
        ending = Ending(self._model, self._tokenizer, task.generation)
        # One each: all have the same luck.
        picks = [picker(self._temperature, logits.device, *draw) for _ in starts]
        answers = []
        for said in generate(self._model, cache, logits, picks, ending, look):
            said.seconds += heard
            answers.append(_Answer(*ending.answer(said.ids), said))
        return answers

    @torch.no_grad()
    def _say(self, cache: Cache, ids: Sequence[Sequence[int]]) -> Float[Tensor, "rows vocabulary"]:
        """Feeds each request its tokens; gives what the last ones foretell."""
        tokens = torch.tensor(ids, device=self._model.device)
        return self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


@dataclass(frozen=True)
class _Answer:
    """To one question; a reply with choices has no tokens."""

    reply: Reply
    finished: bool
    said: Said


def _plain(reply: Reply) -> Any:
    """As JSON has it, which knows no number that overflowed."""
    if isinstance(reply, str):
        return reply
    return [[likelihood if math.isfinite(likelihood) else None, greedy] for likelihood, greedy in reply]


def _nothing() -> None:
    pass
