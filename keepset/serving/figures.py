"""The figures of a load: a summary for programs, and rows of a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from keepset.serving.metrics import Sample
from keepset.serving.vllm_bench import Measured

NONE = "\N{EN DASH}"

_Row = tuple[str, tuple[str, ...], str, float]
"""A figure's name, its keys, its format and the factor of its unit."""
_ROWS: tuple[_Row, ...] = (
    ("requests answered", ("answered",), "{:,.0f}", 1),
    ("requests failed", ("failed",), "{:,.0f}", 1),
    ("time for all, s", ("seconds",), "{:.2f}", 1),
    ("output tokens/s", ("output_tokens_per_second",), "{:.1f}", 1),
    ("first token p50, s", ("first_token_seconds", "p50"), "{:.3f}", 1),
    ("first token p99, s", ("first_token_seconds", "p99"), "{:.3f}", 1),
    ("per token p50, ms", ("seconds_per_token", "p50"), "{:.1f}", 1e3),
    ("per token p99, ms", ("seconds_per_token", "p99"), "{:.1f}", 1e3),
    ("request p50, s", ("request_seconds", "p50"), "{:.2f}", 1),
    ("request p99, s", ("request_seconds", "p99"), "{:.2f}", 1),
    ("running, mean", ("running", "mean"), "{:.1f}", 1),
    ("running, max", ("running", "max"), "{:,.0f}", 1),
    ("waiting, mean", ("waiting", "mean"), "{:.1f}", 1),
    ("waiting, max", ("waiting", "max"), "{:,.0f}", 1),
    ("preemptions", ("preemptions",), "{:,.0f}", 1),
    ("KV cache used, mean", ("kv_usage", "mean"), "{:.1f} %", 100),
    ("KV cache used, max", ("kv_usage", "max"), "{:.1f} %", 100),
)
_DOCUMENTS: tuple[_Row, ...] = (
    ("a document in the pool, MB", ("documents", "nbytes"), "{:.2f}", 1e-6),
    ("documents that the pool holds", ("documents", "held"), "{:,.0f}", 1),
    ("a document's file, MB", ("documents", "file_nbytes"), "{:.2f}", 1e-6),
    ("compressing a document, s", ("documents", "build_seconds"), "{:.2f}", 1),
    ("first question, first token p50, s", ("documents", "first_token_seconds", "first", "p50"), "{:.3f}", 1),
    ("later questions, first token p50, s", ("documents", "first_token_seconds", "later", "p50"), "{:.3f}", 1),
)
_MORE = ("requests answered", "output tokens/s", "running, mean", "running, max", "documents that the pool holds")
"""Rows in which more is better."""
_NEITHER = ("KV cache used", "keepset: ")
"""How rows begin in which neither more nor less is better. In all other rows less is better."""
_TIMES = {"first_token_seconds": "ttft", "seconds_per_token": "tpot", "request_seconds": "e2el"}


def figures(measured: Measured) -> dict[str, Any]:
    """Return the summary of a load, its requests, and the server's metrics."""
    samples = [vars(sample) for sample in measured.samples]
    return {"summary": summary(measured), "requests": measured.requests, "samples": samples}


def summary(measured: Measured) -> dict[str, Any]:
    """Return a load's figures; None for unknown ones.

    Latencies and tokens are those of requests that got their whole answer. Means of metrics are over samples from times
    with open requests.
    """
    report, rows = measured.report, measured.requests
    good = [row for row in rows if row["error"] is None]
    tokens = sum(row["output_tokens"] for row in good)
    result: dict[str, Any] = {
        "requests": len(rows),
        "failed": len(rows) - len(good),
        "seconds": report["duration"],
        "prompt_tokens": sum(row["prompt_tokens"] for row in good),
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / report["duration"] if good else None,
    }
    for name, theirs in _TIMES.items():
        known = good and (theirs != "tpot" or measured.load.output_tokens > 1)
        result[name] = {p: report[f"{p}_{theirs}_ms"] / 1e3 if known else None for p in ("p50", "p99")}
    during = [sample for sample in measured.samples if 0 < sample.time <= report["duration"]]
    for name in ("running", "waiting", "kv_usage"):
        readings = [value for sample in during if (value := getattr(sample, name)) is not None]
        mean = sum(readings) / len(readings) if readings else None
        result[name] = {"mean": mean, "max": max(readings, default=None)}
    result["preemptions"] = _increase([sample.preemptions for sample in measured.samples])
    result["keepset"] = _counters(measured.samples)
    result["errors"] = sorted({row["error"] for row in rows if row["error"] is not None})
    return result


def first_tokens(measured: Measured) -> dict[str, dict[str, float | None]]:
    """Return the median seconds to the first token, for documents' first questions and for later ones."""
    rows, documents = measured.requests, measured.load.requests
    parts = {"first": rows[:documents], "later": rows[documents:]}
    times = {name: [r["first_token_seconds"] for r in part if r["error"] is None] for name, part in parts.items()}
    return {name: {"p50": median(seconds) if seconds else None} for name, seconds in times.items()}


def table_rows(servers: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each figure: its name, a cell for each server, and the ratio if there are two servers."""
    flat = [{**server, **server["summary"]} for server in servers]
    for each in flat:
        each["answered"] = each["requests"] - each["failed"]
    rows = [*(_DOCUMENTS if all("documents" in each for each in flat) else ()), *_ROWS]
    for name in sorted({name for each in flat for name in each["keepset"]}):
        form = "{:.3f}" if "seconds" in name else "{:,.0f}"
        rows.append((f"keepset: {name.replace('_', ' ')}", ("keepset", name), form, 1))
    return [_row(row, flat) for row in rows]


def ratio(value: float | None, to: float | None) -> float | None:
    """Return one figure as a multiple of another; None if one is missing or the other is zero."""
    return None if value is None or to is None or to == 0 else value / to


def rounded(times: float) -> str:
    """Return a ratio as text, such as `1.25`; with two digits below a tenth."""
    return f"{times:.2f}" if times >= 0.1 or times == 0 else f"{times:.2g}"


def _row(row: _Row, servers: Sequence[dict[str, Any]]) -> list[str]:
    name, path, form, scale = row
    values = [_value(each, path) for each in servers]
    cells = [name, *(NONE if value is None else form.format(value * scale) for value in values)]
    if len(values) > 1:
        times = ratio(values[-1], values[0])
        cells.append(NONE if times is None else f"x{rounded(times)}{_verdict(name, times)}")
    return cells


def _value(figures: Any, path: tuple[str, ...]) -> float | None:
    for key in path:
        figures = figures.get(key)
    return figures


def _verdict(name: str, times: float) -> str:
    """Return "better" or "worse" for a row's ratio; "" if neither is, or if the figures are equal."""
    if name.startswith(_NEITHER) or f"{times:.2f}" == "1.00":
        return ""
    return " better" if (times > 1) == (name in _MORE) else " worse"


def _counters(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Return the increase of each of keepset's counters. One that appeared later began at zero."""
    names = sorted({name for sample in samples for name in sample.counters})
    return {name: _increase([sample.counters.get(name, 0.0) for sample in samples]) for name in names}


def _increase(counts: Sequence[float | None]) -> float | None:
    """Return the increase of a counter; None if it was seen less than twice."""
    known = [count for count in counts if count is not None]
    return known[-1] - known[0] if len(known) > 1 else None
