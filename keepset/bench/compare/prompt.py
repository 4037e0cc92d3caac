"""Recipes after a prompt: one prefill, then each of them measured against the full cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedModel

from keepset.bench.compare.comparison import Comparer, Comparison, Measurement, measure
from keepset.bench.compare.fidelity import mean, nll
from keepset.bench.compare.text_task import ANSWER_TOKENS, TextTask
from keepset.bench.generation import end_tokens, greedy
from keepset.bench.tasks.task import Tokenizer
from keepset.hf.cache import Cache
from keepset.hf.prompt_session import PromptSession, warm_up
from keepset.recipe import Recipe


class PromptComparer(Comparer):
    """Measures recipes against the full cache on one prompt, the text that follows and a question.

    `recipes` are all that will be measured; `on_layer` is called after each layer of the prefill.
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
        self._session = PromptSession(model, task.prompt, recipes, on_layer)
        self._session.prefill()
        full = self._session.compress(None)
        self._reference = full.follow(task.continuation)
        answer, speed = self._answer(full.cache)
        self.comparison = Comparison(
            model=name,
            tokens=task.prompt.shape[1],
            continuation_tokens=task.continuation.shape[1],
            needle=task.needle,
            full={
                "kv_bytes": full.kv_bytes_full,
                "nll": mean(nll(self._reference, task.continuation[0])),
                "prefill_seconds": full.prefill_seconds_full,
                "decode_tokens_per_second": speed,
                **self._judged(answer),
            },
        )

    def _measure(self, row: Measurement, recipe: Recipe) -> tuple[Measurement, Bool[Tensor, "layers kv_heads tokens"]]:
        prompt = self._session.compress(recipe)
        keep_set = prompt.event.keep_set
        assert keep_set is not None
        row = measure(row, prompt, self._reference, self._task.continuation)
        answer, speed = self._answer(prompt.cache)
        kept = keep_set.mask(self._task.prompt.shape[1])[:, 0]
        return replace(row, decode_tokens_per_second=speed, **self._judged(answer)), kept

    def _answer(self, cache: Cache) -> tuple[str, float]:
        """Greedy answer to the question (or to the continuation), and tokens per second of decoding it."""
        prompt = self._task.continuation if self._task.question is None else self._task.question
        ids, seconds = greedy(self._model, cache, prompt, ANSWER_TOKENS)
        ends = end_tokens(self._model)
        cut = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        return str(self._tokenizer.decode(ids[:cut], skip_special_tokens=True)).strip(), ANSWER_TOKENS / seconds

    def _judged(self, answer: str) -> dict[str, Any]:
        needle = self._task.needle
        if needle is None:
            return {}
        return {"answer": answer, "needle_found": needle.answer.lower() in answer.lower()}
