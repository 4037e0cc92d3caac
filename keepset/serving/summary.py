"""The figures of a load, from its replies and samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keepset.serving.measure import Round
from keepset.serving.metrics import Sample


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which so many percent lie, between two neighbours in proportion; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """What a server did under a load, over all rounds.

    Latencies and tokens are those of requests that got their whole answer. Means of samples are over those
    taken while a request was outstanding. None is what could not be known.
    """
    replies = [reply for each in rounds for reply in each.replies]
    good = [reply for reply in replies if reply.error is None]
    seconds = sum(each.seconds for each in rounds)
    tokens = sum(reply.output_tokens or 0 for reply in good)
    figures: dict[str, Any] = {
        "requests": len(replies),
        "failed": len(replies) - len(good),
        "seconds": seconds,
        "prompt_tokens": sum(reply.prompt_tokens or 0 for reply in good),
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / seconds if good and seconds > 0 else None,
    }
    for name, values in (
        ("first_token_seconds", [reply.first_token for reply in good]),
        ("seconds_per_token", [reply.per_token for reply in good]),
        ("request_seconds", [reply.total for reply in good]),
    ):
        known = [value for value in values if value is not None]
        figures[name] = {"p50": percentile(known, 50), "p99": percentile(known, 99)}
    during = [sample for each in rounds for sample in each.samples if 0 < sample.time <= each.seconds]
    for name in ("running", "waiting", "kv_usage"):
        readings = [value for sample in during if (value := getattr(sample, name)) is not None]
        figures[name] = {
            "mean": sum(readings) / len(readings) if readings else None,
            "max": max(readings, default=None),
        }
    figures["preemptions"] = _sum([_increase([sample.preemptions for sample in each.samples]) for each in rounds])
    figures["keepset"] = {name: _sum([_counter(each.samples, name) for each in rounds]) for name in _names(rounds)}
    figures["errors"] = sorted({reply.error for reply in replies if reply.error is not None})
    return figures


def ratio(value: float | None, to: float | None) -> float | None:
    """One figure as a multiple of another; None where that says nothing."""
    return None if value is None or to is None or to == 0 else value / to


def _names(rounds: Sequence[Round]) -> list[str]:
    return sorted({name for each in rounds for sample in each.samples for name in sample.counters})


def _counter(samples: Sequence[Sample], name: str) -> float | None:
    """How far a counter came. One that has not been there from the start began at zero."""
    return _increase([sample.counters.get(name, 0.0) for sample in samples])


def _increase(counts: Sequence[float | None]) -> float | None:
    known = [count for count in counts if count is not None]
    return known[-1] - known[0] if len(known) > 1 else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
