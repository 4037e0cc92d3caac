"""Comparison of recipes that compress while decoding with the full cache, along one long text."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from keepset.errors import KeepsetError
from keepset.hf.cache import Cache
from keepset.hf.model_support import check_logits
from keepset.hf.other_layers import mend_mixers
from keepset.hf.prompt_session import warm_up
from keepset.kernels.packed import SLACK
from keepset.lab.compare.comparison import Comparer, Comparison, check_predictions, kl, kl_figures, mean, nll
from keepset.lab.compare.text_task import ANSWER_TOKENS
from keepset.lab.generation import greedy
from keepset.lab.memory import counted_nbytes, dynamic_nbytes, growing_nbytes
from keepset.lab.record import Record
from keepset.recipe import Recipe

DRIFT_TOKENS = 256
"""Tokens of the text for each number of the drift."""


def feed_slices(tokens: int, every: int | None) -> list[slice]:
    """Return the parts in which a text can be fed with the same result as token by token.

    A part ends at each event and one token before it, where a cache is largest. No part is longer than the step by
    which a store grows, so a cache allocates as for single tokens.

    Args:
        tokens: tokens of the text after the prompt.
        every: tokens between two events; None if there are none.
    """
    every = every or tokens
    ends = {
        min(start + offset, tokens)
        for start in range(0, tokens, every)
        for offset in (*range(SLACK, every, SLACK), every - 1, every)
    }
    return [slice(start, stop) for start, stop in pairwise(sorted({0, *ends}))]


@dataclass(frozen=True, eq=False)
class _Run:
    """One pass of the text through a cache, token by token.

    Attributes:
        logits: logits after each token.
        nbytes: bytes held after each token.
        tokens: tokens of a full 16-bit cache with the same bytes as the entries held, at the end of each piece.
    """

    logits: Float[Tensor, "n vocabulary"]
    nbytes: list[int]
    tokens: list[float]
    prefill_seconds: float


class DecodeComparer(Comparer):
    """Measures recipes against the full cache while both read a prompt and the text after it.

    Figures cover the tokens after the recipe's first event. `keep` and `kept` are the share and the tokens that a cache
    holds at the end; `kv_bytes` is the mean of its bytes after each token, with the queries recorded for the next
    event; `share` is the mean without these queries, as a share of a full 16-bit cache's mean. `on_tokens` is called
    repeatedly with the number of tokens that a cache has read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Int[Tensor, "1 tokens"],
        text: Int[Tensor, "1 n"],
        name: str,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._on_tokens = on_tokens
        self._model, self._prompt, self._text = model, prompt, text
        self._length = prompt.shape[1] + text.shape[1]
        mend_mixers(model)  # before the first cache of a recipe does: the full cache gets several tokens at once, too
        warm_up(model, prompt)
        full = DynamicCache(config=model.config)
        self._full = self._feed(full, lambda: (dynamic_nbytes(full), 1.0), None)
        check_logits(self._full.logits)
        before, n = prompt.shape[1], text.shape[1]
        grows = growing_nbytes(full)
        fixed, per_token = dynamic_nbytes(full) - grows, grows / (before + n)
        self._full = replace(self._full, nbytes=[round(fixed + per_token * (before + i)) for i in range(1, n + 1)])
        self._counted_bytes = counted_nbytes(full) / (before + n)  # a token
        self.comparison = Comparison(
            model=name,
            tokens=before,
            continuation_tokens=n,
            full={
                "counted_bytes": round(self._counted_bytes * fmean(range(before + 1, before + n + 1))),
                "kv_bytes": round(fmean(self._full.nbytes)),
                "fixed_bytes": fixed,
                "kv_bytes_peak": max(self._full.nbytes),
                "nll": mean(nll(self._full.logits, text[0])),
                "prefill_seconds": self._full.prefill_seconds,
                "decode_tokens_per_second": self._speed(full, self._full),
            },
            drift_tokens=DRIFT_TOKENS,
        )

    def _measure(self, record: Record, recipe: Recipe) -> tuple[Record, Bool[Tensor, "layers kv_heads tokens"]]:
        cache = Cache(self._model, recipe)
        run = self._feed(cache, lambda: (cache.nbytes, cache.share), recipe.schedule.every)
        check_predictions(run.logits)
        # Only tokens after the first event can differ.
        n, full = self._text.shape[1], self._full
        first = cache.events[0].length - self._prompt.shape[1] if cache.events else n
        if first >= n:
            raise KeepsetError(
                f"{cache.recipe} compresses nothing before the last of {n} tokens: let more tokens follow the prompt."
            )
        counted = slice(first, None)
        drift = kl(full.logits, run.logits)
        nll_delta = nll(run.logits, self._text[0]) - nll(full.logits, self._text[0])
        same = run.logits.argmax(-1) == full.logits.argmax(-1)
        kept = _kept(cache, self._length)
        figures = {
            "keep": float(kept.double().mean()),
            "share": fmean(run.tokens[counted]) / fmean(range(self._prompt.shape[1] + first + 1, self._length + 1)),
            "counted_bytes": round(fmean(run.tokens[counted]) * self._counted_bytes),
            "kv_bytes": round(fmean(run.nbytes[counted])),
            "kv_bytes_peak": max(run.nbytes[counted]),
            "kv_bytes_full": round(fmean(full.nbytes[counted])),
            **kl_figures(drift[counted]),
            "nll_delta": mean(nll_delta[counted]),
            "top1": float(same[counted].double().mean()),
            "prefill_seconds": run.prefill_seconds,
            "prefill_seconds_full": full.prefill_seconds,
            "select_seconds": sum(event.seconds for event in cache.events),
            "decode_tokens_per_second": self._speed(cache, run),
        }
        curves = {"kl_drift": [mean(part) for part in drift.split(DRIFT_TOKENS)]}
        return replace(record, figures=figures, curves=curves), kept

    def _speed(self, cache: Any, run: _Run) -> float:
        _, seconds = greedy(self._model, cache, run.logits[-1].argmax()[None, None], ANSWER_TOKENS)
        return ANSWER_TOKENS / seconds

    @torch.no_grad()
    def _feed(self, cache: Any, held_now: Callable[[], tuple[int, float]], every: int | None) -> _Run:
        start = time.perf_counter()
        self._model(self._prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        prefill_seconds = time.perf_counter() - start
        logits: list[Tensor] = []
        sizes: list[tuple[int, float]] = []
        for part in feed_slices(self._text.shape[1], every):
            ids = self._text[:, part]
            logits.append(self._model(ids, past_key_values=cache, use_cache=True).logits[0])
            nbytes, share = held_now()
            sizes += [(nbytes, share * cache.get_seq_length())] * ids.shape[1]
            self._on_tokens(ids.shape[1])
        return _Run(
            torch.cat(logits), [nbytes for nbytes, _ in sizes], [tokens for _, tokens in sizes], prefill_seconds
        )


def _kept(cache: Cache, length: int) -> Bool[Tensor, "layers kv_heads tokens"]:
    """Return which tokens the newest event kept; all tokens after it count as kept."""
    keep_set, since = cache.keep_set, cache.events[-1].length
    assert keep_set is not None
    kept = keep_set.mask(length)[:, 0]
    kept[..., since:] = True
    return kept
