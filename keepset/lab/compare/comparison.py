"""`Comparison`: the records of recipes on one text, beside the full cache; `conclusion` says them in a sentence."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.errors import KeepsetError
from keepset.hf.prompt_session import CachedPrompt
from keepset.lab.analysis.intervals import of_mean
from keepset.lab.candidate import Candidate
from keepset.lab.record import Record, largest_first
from keepset.lab.texts import Needle
from keepset.recipe import Recipe

LEAST_TOKENS = 256
"""The fewest tokens of text that allow a conclusion; in a shorter text every entry matters."""
_ROUNDED = 1.01
"""A budget counts as exceeded from this multiple of its bytes on."""
_NAMED = 3
"""The most methods that a sentence lists."""


@dataclass
class Comparison:
    """Recipes on one text; records are appended as they are measured.

    A record's `kl` is the mean KL(full || compressed) in nats over the continuation's tokens, `kl_low` and `kl_high`
    are the ends of its interval over these tokens, and `kl_drift` has its parts. `nll_delta` is its negative
    log-likelihood less the full cache's, in nats; `top1` the share of its tokens after which both caches prefer the
    same next token. Bytes while decoding are means over the tokens, and the most.

    Attributes:
        tokens: tokens of the prompt; `continuation_tokens`: those of the text that follows it.
        full: the full cache's figures, and its answer to the question if there is one.
        needle: the hidden fact and its question; None if nothing is asked.
        rows: a record for every recipe.
        kept: for every record the tokens that stayed; None for a record with an error.
        grids: the grid of patches of each image's tokens (`image_grids`).
        drift_tokens: tokens of the continuation for each number of `kl_drift`; None without decoding.
    """

    model: str
    tokens: int
    continuation_tokens: int
    full: dict[str, Any]
    needle: Needle | None = None
    rows: list[Record] = field(default_factory=list)
    kept: list[Bool[Tensor, "layers kv_heads tokens"] | None] = field(default_factory=list)
    drift_tokens: int | None = None
    grids: Sequence[tuple[int, int, int]] = ()

    @property
    def failed(self) -> bool:
        """Whether any record has an error."""
        return any(record.error is not None for record in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as `keepset compare --json` prints it."""
        needle = None if self.needle is None else {"question": self.needle.question, "answer": self.needle.answer}
        return {
            "model": self.model,
            "tokens": self.tokens,
            "continuation_tokens": self.continuation_tokens,
            **({} if self.drift_tokens is None else {"drift_tokens": self.drift_tokens}),
            "needle": needle,
            "full": self.full,
            "rows": [_row(record) for record in self.rows],
        }


def _row(record: Record) -> dict[str, Any]:
    """Return a record's names, figures and answer, without missing ones."""
    named = {name: getattr(record, name) for name in ("recipe", "method", "requested", "error")}
    answer = {"answer": record.replies[0]} if record.replies else {}
    present = {name: value for name, value in named.items() if value is not None}
    return {**present, **record.figures, **record.curves, **answer}


class Comparer(ABC):
    """Measures recipes one after another; `comparison` has the figures so far."""

    comparison: Comparison

    def run(self, candidates: Sequence[Candidate]) -> Iterator[Record]:
        """Measure candidates and yield a record for each; one that cannot be measured has an error."""
        for candidate in candidates:
            record, kept = Record(candidate.text, candidate.method, candidate.requested, error=candidate.error), None
            if candidate.recipe is not None:
                try:
                    record, kept = self._measure(record, candidate.recipe)
                except KeepsetError as error:
                    record = replace(record, error=str(error))
            self.comparison.rows.append(record)
            self.comparison.kept.append(kept)
            yield record

    @abstractmethod
    def _measure(self, record: Record, recipe: Recipe) -> tuple[Record, Bool[Tensor, "layers kv_heads tokens"]]:
        """Measure a recipe; a `KeepsetError` becomes its record's error.

        Args:
            record: the record without figures.
            recipe: the recipe.
        """


_PART = 256
"""Tokens that are compared at once; few, because the vocabulary is large."""


def kl(full: Float[Tensor, "n vocabulary"], compressed: Float[Tensor, "n vocabulary"]) -> Float[Tensor, " n"]:
    """Return KL(full || compressed) after every token in nats, `[n]`.

    Args:
        full: the full cache's logits.
        compressed: the compressed cache's logits after the same tokens.
    """
    parts = zip(full.split(_PART), compressed.split(_PART), strict=True)
    return torch.cat(
        [
            F.kl_div(b.float().log_softmax(-1), a.float().log_softmax(-1), log_target=True, reduction="none").sum(-1)
            for a, b in parts
        ]
    )


def nll(logits: Float[Tensor, "n vocabulary"], tokens: Int[Tensor, " n"]) -> Float[Tensor, " n_less_one"]:
    """Return the negative log-likelihood of every token but the first, which the prompt predicts the same way.

    Args:
        logits: the logits after each token.
        tokens: the tokens.
    """
    parts = zip(logits[:-1].split(_PART), tokens[1:].split(_PART), strict=True)
    return torch.cat([F.cross_entropy(a.float(), b, reduction="none") for a, b in parts])


def mean(figures: Float[Tensor, " n"]) -> float:
    """Return the mean of figures; 0 if there are none."""
    return float(figures.mean()) if figures.numel() else 0.0


def kl_figures(divergences: Float[Tensor, " n"]) -> dict[str, float]:
    """Return the mean of divergences (nats, after every token) as `kl`, and the ends of its interval over the tokens.

    The interval serves to order recipes on one text. It says nothing about other texts.
    """
    whole = mean(divergences)
    interval = of_mean(divergences.tolist()) if math.isfinite(whole) else None
    if interval is None or interval.low is None or interval.high is None:
        return {"kl": whole, "kl_low": whole, "kl_high": whole}
    return {"kl": whole, "kl_low": interval.low, "kl_high": interval.high}


def fidelity(
    prompt: CachedPrompt, reference: Float[Tensor, "n vocabulary"], continuation: Int[Tensor, "1 n"]
) -> dict[str, float]:
    """Return the costs of a compressed prompt, and how near its predictions over a text are to the full cache's.

    Args:
        prompt: the compressed prompt.
        reference: the full cache's logits after each token of the continuation.
        continuation: the text that follows the prompt.

    Raises:
        KeepsetError: the model predicts NaN.
    """
    event, nbytes, share = prompt.event, prompt.cache.nbytes, prompt.cache.share
    assert prompt.kv_bytes_full is not None  # the recipe shares the full cache's prefill
    logits = prompt.follow(continuation)
    check_predictions(logits)
    return {
        "keep": event.kept / event.entries,
        "share": share,
        "counted_bytes": prompt.cache.nbytes_counted,
        "kv_bytes": nbytes,
        "kv_bytes_full": prompt.kv_bytes_full,
        **kl_figures(kl(reference, logits)),
        "nll_delta": mean(nll(logits, continuation[0])) - mean(nll(reference, continuation[0])),
        "top1": float((logits.argmax(-1) == reference.argmax(-1)).double().mean()),
        "prefill_seconds": prompt.prefill_seconds + event.seconds,
        "prefill_seconds_full": prompt.prefill_seconds_full,
        "select_seconds": event.seconds,
    }


def check_predictions(logits: Float[Tensor, "n vocabulary"]) -> None:
    """Raise `KeepsetError` if the model predicts NaN with a recipe's cache."""
    if bool(logits.isnan().any()):
        raise KeepsetError("The model predicts NaN with this recipe's cache: there is nothing to compare.")


def by_budget(comparison: Comparison) -> list[list[Record]]:
    """Return the records with figures by budget, the largest first, and under each budget the best first.

    A record that answers like the full cache is better than one that does not; then the lower KL is better.
    """
    rows = [row for row in comparison.rows if row.error is None]
    has_needle = bool(comparison.full.get("needle_found"))

    def worth(row: Record) -> tuple[bool, float]:
        return has_needle and not row.figures["needle_found"], row.figures["kl"]

    def budget(row: Record) -> tuple[bool, bool, float, str]:
        return largest_first(row.requested)

    groups = groupby(sorted(rows, key=budget), key=budget)
    return [sorted(group, key=worth) for _, group in groups]


def conclusion(comparison: Comparison) -> str:
    """Return a sentence for readers who skip the table, about the smallest budget with a result.

    Recipes whose intervals of KL overlap are called a tie. A recipe that keeps more than its share of the bytes,
    because some entries always stay, is not compared with others under that budget. Nothing is concluded from a text of
    fewer than `LEAST_TOKENS` tokens.
    """
    tokens = comparison.tokens + (comparison.continuation_tokens if comparison.drift_tokens is not None else 0)
    if tokens < LEAST_TOKENS:
        return f"Nothing can be concluded from a text of {tokens} tokens: give one of at least {LEAST_TOKENS}."
    groups = sorted(([row for row in rows if _keeps_to_it(row)] or rows for rows in by_budget(comparison)), key=_share)
    if not groups:
        return "No recipe could be measured."
    if not comparison.full.get("needle_found"):
        return _nearest(groups[0], comparison.continuation_tokens)
    for rows in groups:
        if rows[0].figures["needle_found"]:
            return _answering(rows)
    return "Under none of these budgets does a recipe answer the question as the full cache does: try larger ones."


def _keeps_to_it(row: Record) -> bool:
    """Return whether a row holds no more than its budget's share of the bytes, if the budget is a share."""
    name, _, number = (row.requested or "").partition("=")
    return name != "bytes" or row.figures["share"] <= _ROUNDED * float(number)


def _answering(rows: Sequence[Record]) -> str:
    found = [row.method for row in rows if row.figures["needle_found"]]
    lost = [row.method for row in rows if not row.figures["needle_found"]]
    does = "answers" if len(found) == 1 else "answer"
    lost_part = f"; {_listed(lost)} {'has' if len(lost) == 1 else 'have'} lost the fact" if lost else ""
    return f"Asked one question {_within(rows)}, {_listed(found)} {does} as the full cache does{lost_part}."


def _nearest(rows: Sequence[Record], tokens: int) -> str:
    best, last = rows[0], rows[-1]
    tied = [row for row in rows if row.figures["kl_low"] <= best.figures["kl_high"]]
    if len(tied) == 1:
        figures = f"KL {best.figures['kl']:.3f}, the same next token in {best.figures['top1']:.0%} of {tokens} places"
        furthest = f", {last.method} furthest (KL {last.figures['kl']:.3f})" if len(rows) > 1 else ""
        return f"On this text, {_within(rows)}, {best.method} is nearest to the full cache ({figures}){furthest}."
    span = f"KL {best.figures['kl']:.3f} to {tied[-1].figures['kl']:.3f} over {tokens} tokens"
    if len(tied) == len(rows):
        return f"On this text, {_within(rows)}, the recipes cannot be told apart ({span})."
    return (
        f"On this text, {_within(rows)}, {_listed([row.method for row in tied])} are nearest to the full cache, a tie "
        f"({span}); {last.method} is furthest (KL {last.figures['kl']:.3f})."
    )


def _share(rows: Sequence[Record]) -> float:
    """Return the best row's share of a full 16-bit cache's bytes."""
    return rows[0].figures["share"]


def _within(rows: Sequence[Record]) -> str:
    return f"with {_share(rows):.0%} of a full 16-bit cache's bytes"


def _listed(names: Sequence[str]) -> str:
    """Return names as a list for a sentence; only the first few of many."""
    *leading, last = [*names[:_NAMED], *([f"{len(names) - _NAMED} more"] if len(names) > _NAMED else [])]
    return f"{', '.join(leading)} and {last}" if leading else last
