"""`Record`: the figures of one recipe on one example of a task, or on one text; tables and charts are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

FULL = "full cache"
"""The recipe's text and method of the cache that drops nothing; every sweep and comparison has it."""

FIGURES = {
    "keep": "fraction of the context's entries that stayed; while decoding, of all tokens at the end",
    "share": "bytes of the entries that are held, of a full 16-bit cache's, as `Budget.bytes` counts them; while "
    "decoding, at the moment of kv_bytes",
    "counted_bytes": "bytes of the entries that are held, counted as `share` counts them",
    "kv_bytes": "bytes allocated for keys and values after compression; while decoding, the most after any token",
    "kv_bytes_full": "bytes of the full cache at the same moment",
    "computed": "tokens of a conversation that were computed before its questions, summaries of it included",
    "tokens": "generated tokens",
    "finished": "share of answers that ended by themselves or at a text of `until`, and were not cut off",
    "repetition": "share of the generated tokens' four-grams that occurred before in the same answer",
    "prefill_seconds": "seconds of the shared prefill and of what was collected for this recipe",
    "select_seconds": "seconds of choosing and freeing",
    "decode_seconds": "seconds of reading the question and generating, or of scoring choices; of answers that are "
    "decoded side by side, an even share",
    "batch": "how many answers were decoded side by side, mean over the tokens",
    "peak_bytes": "the most bytes that the device had allocated in any call of the model, weights and the rest of the "
    "batch included; unknown on a CPU",
    "wipeout": "share of the text's regions of which an event kept nothing",
    "middle": "share of the text's middle third that an event kept",
    "longest_gap": "tokens of the longest stretch of neighbours that are dropped",
    "length_by_mass": "correlation of the length of a head's segments with their mass per entry",
    "survived": "share of what an event kept that the next one kept",
    **{
        f"{name}{stage}": f"{meaning}{of_stage}"
        for name, meaning in (
            ("iou", "intersection over union of what an event and the one before it kept"),
            (
                "segments",
                "segments that a method such as AMS cuts a head's entries into; of other methods, runs of neighbouring "
                "tokens that stayed"
            ),
            ("segment_length", "entries of a head's mean segment, or tokens of its mean run"),
        )
        for stage, of_stage in (
            ("", ""), ("_early", ", early layers"), ("_middle", ", middle layers"), ("_late", ", late layers")
        )
    },
}  # fmt: skip
"""Figures of a benchmark's records that have means, with their meanings. `wipeout` and those after it are means over
events, layers and KV heads of recipes that compress while decoding."""


@dataclass(frozen=True)
class Record:
    """Figures of one recipe on one example or text, or the reason why there are none.

    Attributes:
        recipe: the recipe's text with its budget, or `FULL`.
        method: the recipe's text without its budget, or `FULL`.
        requested: the requested budget, such as `bytes=0.25` or `keep=512`; None if the method decides, and for the
            full cache.
        task: the task's name; empty if the record is of a text.
        seed: the seed of generated data and of sampling.
        example: the example's id; intervals are over examples.
        facts: facts of the example, such as its depth or level.
        metric: the name of the score that counts.
        scores: scores by the task's names, from 0 to 1.
        figures: numbers by name; unknown ones are left out.
        curves: figures along the text by name.
        replies: the answers, one per question; likelihoods of choices in JSON's types.
        error: why there are no figures, in one sentence; None if there are.
    """

    recipe: str
    method: str
    requested: str | None = None
    task: str = ""
    seed: int = 0
    example: str = ""
    facts: Mapping[str, float | str] = field(default_factory=dict)
    metric: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    replies: Sequence[Any] = ()
    error: str | None = None

    @property
    def score(self) -> float:
        """The task's metric; an error counts as no answer."""
        return 0.0 if self.error is not None else self.scores[self.metric]

    def ratio(self, name: str) -> float | None:
        """Return a figure divided by the full cache's, whose name ends with `_full`; None if either is unknown or 0."""
        value, full = self.figures.get(name), self.figures.get(f"{name}_full")
        return value / full if value is not None and full else None

    def to_json(self) -> dict[str, Any]:
        """Return the record as a sweep's file stores it."""
        outcome = None if self.error is not None else {"scores": self.scores, "replies": self.replies, **self.figures}
        names = ("task", "seed", "example", "recipe", "method", "requested", "facts", "metric", "error")
        return {**{name: getattr(self, name) for name in names}, "outcome": outcome}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Return the record of `to_json`.

        Raises:
            TypeError, KeyError: the data are not a record.
        """
        fields = {**data}
        outcome = fields.pop("outcome")
        if outcome is None:
            return cls(**fields)
        outcome = {**outcome}
        scores, replies = outcome.pop("scores"), outcome.pop("replies")
        figures = {name: value for name, value in outcome.items() if value is not None}
        return cls(**fields, scores=scores, replies=replies, figures=figures)


def largest_first(requested: str | None) -> tuple[bool, bool, float, str]:
    """Return a sort key of budgets: shares, then entries per head, each from the largest; no budget comes last."""
    if requested is None:
        return True, False, 0.0, ""
    name, _, number = requested.partition("=")
    return False, number.isdecimal(), -float(number), name


def mean_figures(parts: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of each of `FIGURES` over the parts that have it; None if no part has."""
    values_by_name = {name: [value for part in parts if (value := part.get(name)) is not None] for name in FIGURES}
    return {name: fmean(values) if values else None for name, values in values_by_name.items()}


def merged(records: Sequence[Record]) -> Record:
    """Return one record of several questions about an example: means of scores and figures, and all replies."""
    first = records[0]
    figures = {
        name: round(value) if name.endswith(("bytes", "bytes_full")) else value
        for name, value in mean_figures([record.figures for record in records]).items()
        if value is not None
    }
    return replace(
        first,
        scores={name: fmean(record.scores[name] for record in records) for name in first.scores},
        figures=figures,
        replies=[reply for record in records for reply in record.replies],
    )
