"""`Cell`: what one recipe made of one example, the unit of every sweep and figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

FULL = "full cache"
"""Stands where a recipe's text would, for the cache that drops nothing; every sweep has it."""


@dataclass(frozen=True)
class Outcome:
    """Figures of one cell: means over the example's questions, where there are several.

    Attributes:
        scores: by the task's names, from 0 to 1.
        replies: what was answered, one per question; likelihoods of choices as JSON has them.
        keep: fraction of the context's entries that stayed; while decoding, of all tokens at the end.
        kv_bytes: of keys and values: right after the compression, or while decoding the most after any token; the full
            cache's are those at the same moment.
        tokens: generated.
        finished: share of answers that ended by themselves or at a text of `until`, and were not cut off.
        repetition: share of the generated tokens' four-grams that were there before, in the same answer.
        prefill_seconds: of the shared prefill and of what was collected for this recipe.
        select_seconds: choosing and freeing.
        decode_seconds: hearing the question and generating, or scoring the choices; of a batch an even share.
    """

    scores: dict[str, float]
    replies: list[Any]
    keep: float
    kv_bytes: int
    kv_bytes_full: int
    tokens: float = 0.0
    finished: float = 1.0
    repetition: float = 0.0
    prefill_seconds: float = 0.0
    select_seconds: float = 0.0
    decode_seconds: float = 0.0


COSTS = tuple(each.name for each in fields(Outcome) if each.name not in ("scores", "replies"))
"""The figures that have means."""


@dataclass(frozen=True)
class Cell:
    """What a candidate's `recipe`, `method` and `requested` made of one of a task's examples.

    The seed is that of the generated data and of sampling, the metric says which of the outcome's scores counts; the
    outcome is None where `error` says in one sentence why there is none.
    """

    task: str
    seed: int
    example: str
    recipe: str
    method: str
    requested: int | float | None
    facts: Mapping[str, float | str]
    metric: str
    outcome: Outcome | None
    error: str | None = None

    @property
    def score(self) -> float:
        """The task's metric. An error counts as no answer."""
        return 0.0 if self.outcome is None else self.outcome.scores[self.metric]

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "facts": dict(self.facts)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        """What `to_json` gave."""
        outcome = data["outcome"]
        return cls(**{**data, "outcome": None if outcome is None else Outcome(**outcome)})
