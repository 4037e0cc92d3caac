"""One prefill of the full cache, then every recipe measured against it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keepset.bench.candidate import Candidate
from keepset.bench.fidelity import kl, mean, nll
from keepset.bench.greedy import greedy
from keepset.bench.text_task import ANSWER_TOKENS, Task
from keepset.core.feature import Needs
from keepset.errors import KeepsetError
from keepset.hf.cache import Cache
from keepset.hf.recorder import Recorder
from keepset.methods.streaming_llm import StreamingLLM
from keepset.recipe import Recipe

if TYPE_CHECKING:
    import transformers


@dataclass(frozen=True)
class Row:
    """One recipe's figures; those that could not be had are None and `error` says why.

    Attributes:
        recipe: canonical text.
        method: the method without its budget.
        keep: fraction of the prompt's entries that stayed.
        kv_bytes: bytes allocated after compression.
        kv_bytes_peak: the most bytes held after any token, while decoding.
        kv_bytes_full: bytes of the whole prompt's keys and values.
        kl: mean KL(full || compressed) in nats over the continuation's tokens.
        kl_drift: the same of every `drift_tokens` tokens of the continuation, while decoding.
        nll_delta: mean negative log-likelihood of the continuation, less the full cache's, in nats.
        top1: share of the continuation's tokens after which both caches prefer the same next token.
        prefill_seconds: of a prefill with this recipe: the shared one, what was collected for it, selection.
        prefill_seconds_full: of the shared prefill alone.
        select_seconds: choosing and freeing, over all layers.
        decode_tokens_per_second: one token at a time, after the prompt.
        answer: what the model answers to the question.
        needle_found: whether that contains the right answer.
    """

    recipe: str
    method: str
    error: str | None = None
    keep: float | None = None
    kv_bytes: int | None = None
    kv_bytes_peak: int | None = None
    kv_bytes_full: int | None = None
    kl: float | None = None
    kl_drift: list[float] | None = None
    nll_delta: float | None = None
    top1: float | None = None
    prefill_seconds: float | None = None
    prefill_seconds_full: float | None = None
    select_seconds: float | None = None
    decode_tokens_per_second: float | None = None
    answer: str | None = None
    needle_found: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """The row without what it does not have."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class Comparison:
    """Recipes on one text; rows are appended as they are measured.

    Attributes:
        kept: per row which tokens stayed, `[layers, kv_heads, tokens]`; None for failed rows.
        drift_tokens: how many tokens each figure of a row's `kl_drift` stands for; None without decoding.
    """

    model: str
    tokens: int
    continuation_tokens: int
    question: str | None
    expected_answer: str | None
    full: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    kept: list[Bool[Tensor, "layers kv_heads tokens"] | None] = field(default_factory=list)
    drift_tokens: int | None = None

    @property
    def failed(self) -> bool:
        """Whether any row has an error."""
        return any(row.error is not None for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """As `keepset compare --json` prints it."""
        asked = None if self.question is None else {"question": self.question, "answer": self.expected_answer}
        return {
            "model": self.model,
            "tokens": self.tokens,
            "continuation_tokens": self.continuation_tokens,
            **({} if self.drift_tokens is None else {"drift_tokens": self.drift_tokens}),
            "needle": asked,
            "full": self.full,
            "rows": [row.to_json() for row in self.rows],
        }


class RowByRow(ABC):
    """Measures recipes one after another; `comparison` holds what is known so far."""

    comparison: Comparison

    def run(self, candidates: Sequence[Candidate]) -> Iterator[Row]:
        """Measures candidates, one row each; what cannot be had is a row with the reason."""
        for candidate in candidates:
            row, kept = Row(candidate.text, candidate.method, error=candidate.error), None
            if candidate.recipe is not None:
                try:
                    row, kept = self._row(row, candidate.recipe)
                except KeepsetError as error:
                    row = replace(row, error=str(error))
            self.comparison.rows.append(row)
            self.comparison.kept.append(kept)
            yield row

    @abstractmethod
    def _row(self, row: Row, recipe: Recipe) -> tuple[Row, Bool[Tensor, "layers kv_heads tokens"]]:
        """The row with a recipe's figures, and what it kept.

        Raises:
            KeepsetError: it cannot be had.
        """


class Comparer(RowByRow):
    """Measures recipes against the full cache on one task."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerBase,
        task: Task,
        name: str,
        needs: Needs,
        on_layer: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._tokenizer, self._task = model, tokenizer, task
        # Cold caches, thread pools and allocators would be booked on the one prefill that is timed.
        with torch.no_grad():
            model(task.prompt[:, :64])
        self._recorder = Recorder(model, needs, on_layer)
        self._recorder.prefill(task.prompt)
        full = Cache.from_prompt(
            model, Recipe.of(StreamingLLM(), keep=1.0), self._recorder, self._recorder.observations
        )
        self._reference = self._continue(full.fork())
        answer, speed = self._answer(full)
        needle = task.needle
        self.comparison = Comparison(
            model=name,
            tokens=task.prompt.shape[1],
            continuation_tokens=task.continuation.shape[1],
            question=None if needle is None else needle.question,
            expected_answer=None if needle is None else needle.answer,
            full={
                "kv_bytes": self._recorder.nbytes_full,
                "nll": mean(nll(self._reference, task.continuation[0])),
                "prefill_seconds": self._recorder.seconds,
                "decode_tokens_per_second": speed,
                **self._judged(answer),
            },
        )

    def _row(self, row: Row, recipe: Recipe) -> tuple[Row, Bool[Tensor, "layers kv_heads tokens"]]:
        recorder = self._recorder
        cache = Cache.from_prompt(self._model, recipe, recorder, recorder.observations)
        (event,) = cache.events
        keep_set = event.keep_set
        assert keep_set is not None
        nbytes = cache.nbytes
        logits = self._continue(cache.fork())
        answer, speed = self._answer(cache)
        row = replace(
            row,
            keep=event.kept / event.entries,
            kv_bytes=nbytes,
            kv_bytes_full=recorder.nbytes_full,
            kl=mean(kl(self._reference, logits)),
            nll_delta=mean(nll(logits, self._task.continuation[0])) - self.comparison.full["nll"],
            top1=float((logits.argmax(-1) == self._reference.argmax(-1)).double().mean()),
            prefill_seconds=recorder.seconds_for(recipe.method.needs) + event.seconds,
            prefill_seconds_full=recorder.seconds,
            select_seconds=event.seconds,
            decode_tokens_per_second=speed,
            **self._judged(answer),
        )
        return row, keep_set.mask(self._task.prompt.shape[1])[:, 0]

    @torch.no_grad()
    def _continue(self, cache: Cache) -> Float[Tensor, "n vocabulary"]:
        """Logits after each token of the continuation, teacher-forced."""
        return self._model(self._task.continuation, past_key_values=cache, use_cache=True).logits[0]

    def _answer(self, cache: Cache) -> tuple[str, float]:
        """Greedy answer to the question (or to the continuation), and tokens per second of decoding it."""
        asked = self._task.continuation if self._task.question is None else self._task.question
        ids, seconds = greedy(self._model, cache, asked, ANSWER_TOKENS)
        ends = self._model.generation_config.eos_token_id
        stops = {ends} if isinstance(ends, int) else set(ends or ())
        cut = next((i for i, token in enumerate(ids) if token in stops), len(ids))
        return str(self._tokenizer.decode(ids[:cut], skip_special_tokens=True)).strip(), ANSWER_TOKENS / seconds

    def _judged(self, answer: str) -> dict[str, Any]:
        needle = self._task.needle
        if needle is None:
            return {}
        return {"answer": answer, "needle_found": needle.answer.lower() in answer.lower()}


def needs_of(recipes: Sequence[Recipe]) -> Needs:
    """What one prefill has to collect to serve all these recipes."""
    return reduce(or_, (recipe.method.needs for recipe in recipes), Needs())
