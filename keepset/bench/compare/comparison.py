"""`Comparison`: what recipes made of one text, beside the full cache, row by row."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.bench.candidate import Candidate
from keepset.bench.compare.fidelity import kl, mean, nll
from keepset.errors import KeepsetError
from keepset.hf.prompt_session import CachedPrompt
from keepset.recipe import Recipe
from keepset.texts import Needle


@dataclass(frozen=True)
class Measurement:
    """What one recipe made of one text, beside the full cache; what could not be had is None, `error` says why.

    Attributes:
        requested: the budget; None where the method decides.
        keep: fraction of the prompt's entries that stayed.
        kv_bytes: allocated after compression; the peak is the most after any token, while decoding.
        kl: mean KL(full || compressed) in nats over the continuation's tokens.
        kl_drift: the same of every `drift_tokens` tokens of the continuation, while decoding.
        nll_delta: mean negative log-likelihood of the continuation, less the full cache's, in nats.
        top1: share of the continuation's tokens after which both caches prefer the same next token.
        prefill_seconds: of a prefill with this recipe: the shared one, what was collected for it, selection.
        decode_tokens_per_second: one token at a time, after the prompt.
        needle_found: whether the answer to the question contains the right one; of several questions, `facts_found`.
    """

    recipe: str
    method: str
    requested: int | float | None = None
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
    facts_found: tuple[bool, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """All of it without what it does not have."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class Comparison:
    """Recipes on one text; rows are appended as they are measured.

    `kept` says per row which tokens stayed, None for failed rows; `drift_tokens` how many tokens each figure of a row's
    `kl_drift` stands for, None without decoding.
    """

    model: str
    tokens: int
    continuation_tokens: int
    full: dict[str, Any]
    needle: Needle | None = None
    rows: list[Measurement] = field(default_factory=list)
    kept: list[Bool[Tensor, "layers kv_heads tokens"] | None] = field(default_factory=list)
    drift_tokens: int | None = None

    @property
    def failed(self) -> bool:
        """Whether any row has an error."""
        return any(row.error is not None for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """As `keepset compare --json` prints it."""
        needle = None if self.needle is None else {"question": self.needle.question, "answer": self.needle.answer}
        return {
            "model": self.model,
            "tokens": self.tokens,
            "continuation_tokens": self.continuation_tokens,
            **({} if self.drift_tokens is None else {"drift_tokens": self.drift_tokens}),
            "needle": needle,
            "full": self.full,
            "rows": [row.to_json() for row in self.rows],
        }


class Comparer(ABC):
    """Measures recipes one after another; `comparison` holds what is known so far."""

    comparison: Comparison

    def run(self, candidates: Sequence[Candidate]) -> Iterator[Measurement]:
        """Measures candidates, one row each; what cannot be had is a row with the reason."""
        for candidate in candidates:
            row, kept = Measurement(candidate.text, candidate.method, candidate.requested, candidate.error), None
            if candidate.recipe is not None:
                try:
                    row, kept = self._measure(row, candidate.recipe)
                except KeepsetError as error:
                    row = replace(row, error=str(error))
            self.comparison.rows.append(row)
            self.comparison.kept.append(kept)
            yield row

    @abstractmethod
    def _measure(self, row: Measurement, recipe: Recipe) -> tuple[Measurement, Bool[Tensor, "layers kv_heads tokens"]]:
        """The row with a recipe's figures, and what it kept; raises KeepsetError where they cannot be had."""


def measure(
    row: Measurement, prompt: CachedPrompt, reference: Float[Tensor, "n vocabulary"], continuation: Int[Tensor, "1 n"]
) -> Measurement:
    """The row with a compressed prompt's cost, and its fidelity over the text that follows.

    The reference is the full cache's logits after each token of the continuation.
    """
    event, nbytes = prompt.event, prompt.cache.nbytes
    logits = prompt.follow(continuation)
    check_predictions(logits)
    return replace(
        row,
        keep=event.kept / event.entries,
        kv_bytes=nbytes,
        kv_bytes_full=prompt.kv_bytes_full,
        kl=mean(kl(reference, logits)),
        nll_delta=mean(nll(logits, continuation[0])) - mean(nll(reference, continuation[0])),
        top1=float((logits.argmax(-1) == reference.argmax(-1)).double().mean()),
        prefill_seconds=prompt.prefill_seconds + event.seconds,
        prefill_seconds_full=prompt.prefill_seconds_full,
        select_seconds=event.seconds,
    )


def check_predictions(logits: Float[Tensor, "n vocabulary"]) -> None:
    """Refuses figures of a compressed cache under which the model predicts NaN: KeepsetError."""
    if bool(logits.isnan().any()):
        raise KeepsetError("With what this recipe keeps the model predicts NaN: there is nothing to compare.")
