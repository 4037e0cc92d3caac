"""Comparison of recipes after a prompt: one prefill, then each recipe is measured against the full cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedModel

from keepset.hf.cache import Cache
from keepset.hf.prompt_session import PromptSession, warm_up
from keepset.lab.compare.comparison import Comparer, Comparison, fidelity, mean, nll
from keepset.lab.compare.text_task import TextTask
from keepset.lab.generation import end_tokens, greedy
from keepset.lab.record import Record
from keepset.lab.tasks.task import Tokenizer
from keepset.recipe import Recipe


class PromptComparer(Comparer):
    """Measures recipes against the full cache on one prompt, the text that follows and a question.

    If the task has no continuation, the question and the full cache's answer follow the prompt. `recipes` are all that
    will be measured; `on_layer` is called after each layer of the prefill.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        task: TextTask,
        name: str,
        recipes: Sequence[Recipe],
        on_layer: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._tokenizer, self._task = model, tokenizer, task
        warm_up(model, task.prompt)
        self._session = PromptSession(model, task.prompt, recipes, on_layer, images=task.images)
        full = self._session.compress(None)
        ids, speed = self._ask(full.cache.fork())
        self._continuation = task.continuation
        if task.question is not None and not task.continuation.numel():
            following = torch.tensor([ids], dtype=torch.long, device=task.question.device)
            self._continuation = torch.cat([task.question, following], 1)
        self._reference = full.follow(self._continuation)
        answer = self._read(ids)
        self.comparison = Comparison(
            model=name,
            tokens=task.prompt.shape[1],
            continuation_tokens=self._continuation.shape[1],
            needle=task.needle,
            grids=task.grids,
            full={
                "counted_bytes": full.cache.nbytes_counted_full,
                "kv_bytes": full.kv_bytes_full,
                "fixed_bytes": full.cache.nbytes_fixed,
                "nll": mean(nll(self._reference, self._continuation[0])),
                "prefill_seconds": full.prefill_seconds_full,
                "decode_tokens_per_second": speed,
                **({} if task.needle is None else {"answer": answer, "needle_found": self._is_right(answer)}),
            },
        )

    def _measure(self, record: Record, recipe: Recipe) -> tuple[Record, Bool[Tensor, "layers kv_heads tokens"]]:
        prompt = self._session.compress(recipe)
        keep_set = prompt.event.keep_set
        assert keep_set is not None
        figures = fidelity(prompt, self._reference, self._continuation)
        ids, speed = self._ask(prompt.cache)
        answer = self._read(ids)
        kept = keep_set.mask(self._task.prompt.shape[1])[:, 0]
        figures["decode_tokens_per_second"] = speed
        if self._task.needle is None:
            return replace(record, figures=figures), kept
        figures["needle_found"] = self._is_right(answer)
        return replace(record, figures=figures, replies=[answer]), kept

    def _ask(self, cache: Cache) -> tuple[list[int], float]:
        """Return the greedy answer to the question or the continuation, and its tokens per second."""
        task = self._task
        prompt = task.continuation if task.question is None else task.question
        ids, seconds = greedy(self._model, cache, prompt, task.answer_tokens)
        return ids, task.answer_tokens / seconds

    def _read(self, ids: list[int]) -> str:
        """Return the text of tokens up to the first end of text."""
        ends = end_tokens(self._model)
        cut = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        return str(self._tokenizer.decode(ids[:cut], skip_special_tokens=True)).strip()

    def _is_right(self, answer: str) -> bool:
        needle = self._task.needle
        return needle is not None and needle.answer.lower() in answer.lower()
