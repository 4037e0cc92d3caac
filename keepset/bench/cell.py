"""`Cell`: what one recipe made of one example, the unit of every sweep and figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

FULL = "full cache"
"""Stands where a recipe's text would, for the cache that drops nothing; every sweep has it."""


@dataclass(frozen=True, kw_only=True)
class EventMeans:
    """What the events of recipes with `every=` come to, see `diagnostics`; None where nothing is known.

    Attributes:
        wipeout: of the text's regions, the share of which an event kept nothing, on the mean over events, layers and
            KV heads.
        middle: of the middle third of the text, the share that an event kept.
        iou: intersection over union of what an event and the one before it kept; `iou_early`, `iou_middle` and
            `iou_late` that of the layers of these stages.
        segments: that a method such as AMS cuts a head's entries into, at events after the prompt's.
        segment_length: entries of a head's mean segment; both also by stages of layers.
    """

    wipeout: float | None = None
    middle: float | None = None
    iou: float | None = None
    iou_early: float | None = None
    iou_middle: float | None = None
    iou_late: float | None = None
    segments: float | None = None
    segments_early: float | None = None
    segments_middle: float | None = None
    segments_late: float | None = None
    segment_length: float | None = None
    segment_length_early: float | None = None
    segment_length_middle: float | None = None
    segment_length_late: float | None = None


@dataclass(frozen=True)
class Outcome(EventMeans):
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
        decode_seconds: hearing the question and generating, or scoring the choices; of answers that are decoded side
            by side an even share.
        batch: how many were, on the mean over the tokens.
        peak_bytes: the most that the device had allocated in any call of the model for it, weights and the others of
            the batch included; None on a CPU.
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
    batch: float = 1.0
    peak_bytes: float | None = None


COSTS = tuple(each.name for each in fields(Outcome) if each.name not in ("scores", "replies"))
"""The figures that have means, over the outcomes where they are not None."""


def means(outcomes: Sequence[Any]) -> dict[str, float | None]:
    """Of all `COSTS` of outcomes, or of what has the same figures."""
    values = {name: [value for each in outcomes if (value := getattr(each, name)) is not None] for name in COSTS}
    return {name: fmean(there) if there else None for name, there in values.items()}


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
