"""The figures of a load, from its replies and samples."""

from collections.abc import Sequence
from typing import Any

import torch

from keepset.serving.measure import Round


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which so many percent lie, between two neighbours in proportion; None of nothing."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(percent / 100)) if values else None


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
    for name, attribute in (
        ("first_token_seconds", "first_token"), ("seconds_per_token", "per_token"), ("request_seconds", "total")
    ):  # fmt: skip
        times = [value for reply in good if (value := getattr(reply, attribute)) is not None]
        figures[name] = {"p50": percentile(times, 50), "p99": percentile(times, 99)}
    during = [sample for each in rounds for sample in each.samples if 0 < sample.time <= each.seconds]
    for name in ("running", "waiting", "kv_usage"):
        readings = [value for sample in during if (value := getattr(sample, name)) is not None]
        mean = sum(readings) / len(readings) if readings else None
        figures[name] = {"mean": mean, "max": max(readings, default=None)}
    figures["preemptions"] = _increase([[sample.preemptions for sample in each.samples] for each in rounds])
    counters = sorted({name for each in rounds for sample in each.samples for name in sample.counters})
    # A counter that has not been there from the start began at zero.
    figures["keepset"] = {
        name: _increase([[sample.counters.get(name, 0.0) for sample in each.samples] for each in rounds])
        for name in counters
    }
    figures["errors"] = sorted({reply.error for reply in replies if reply.error is not None})
    return figures


def ratio(value: float | None, to: float | None) -> float | None:
    """One figure as a multiple of another; None where that says nothing."""
    return None if value is None or to is None or to == 0 else value / to


def rounded(times: float) -> str:
    """A ratio for a person: `1.25`, and two digits of what is below a tenth."""
    return f"{times:.2f}" if times >= 0.1 or times == 0 else f"{times:.2g}"


def as_times(times: float) -> str:
    """The same in a table: `x1.25`."""
    return f"x{rounded(times)}"


def _increase(rounds: Sequence[Sequence[float | None]]) -> float | None:
    """How far a counter came in all rounds; None where none of them saw it twice."""
    known = [[count for count in counts if count is not None] for counts in rounds]
    increases = [counts[-1] - counts[0] for counts in known if len(counts) > 1]
    return sum(increases) if increases else None
