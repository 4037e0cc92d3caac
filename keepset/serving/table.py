"""The figures of a run in rows for a person: what, each server's, and the ratio of the last to the first."""

from collections.abc import Sequence
from typing import Any

from keepset.serving.summary import as_times, ratio

NONE = "\N{EN DASH}"

_ROWS = (
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


_DOCUMENTS = (
    ("a document in the pool, MB", ("documents", "nbytes"), "{:.2f}", 1e-6),
    ("documents that the pool holds", ("documents", "held"), "{:,.0f}", 1),
    ("a document's file, MB", ("documents", "file_nbytes"), "{:.2f}", 1e-6),
    ("compressing a document, s", ("documents", "build_seconds"), "{:.2f}", 1),
    ("first question, first token p50, s", ("documents", "first_token_seconds", "first", "p50"), "{:.3f}", 1),
    ("later questions, first token p50, s", ("documents", "first_token_seconds", "later", "p50"), "{:.3f}", 1),
)


_MORE = ("requests answered", "output tokens/s", "running, mean", "running, max", "documents that the pool holds")
"""Of these more is better."""
_NEITHER = ("KV cache used", "keepset: ")
"""Of what begins so neither is; of all others less is."""


def documents_rows(servers: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The same of documents that were asked about, if they were."""
    rows = _DOCUMENTS if all("documents" in each for each in servers) else ()
    return [_row(row, servers) for row in rows]


def table_rows(summaries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row per figure: its name, one cell per server and, of two servers, their ratio."""
    rows: list[tuple[str, tuple[str, ...], str, float]] = list(_ROWS)
    for name in sorted({name for each in summaries for name in each["keepset"]}):
        form = "{:.3f}" if "seconds" in name else "{:,.0f}"
        rows.append((f"keepset: {name.replace('_', ' ')}", ("keepset", name), form, 1))
    figures = [{**each, "answered": each["requests"] - each["failed"]} for each in summaries]
    return [_row(row, figures) for row in rows]


def _value(figures: Any, path: tuple[str, ...]) -> float | None:
    for key in path:
        figures = figures.get(key)
    return figures


def _row(row: tuple[str, tuple[str, ...], str, float], figures: Sequence[dict[str, Any]]) -> list[str]:
    name, path, form, scale = row
    values = [_value(each, path) for each in figures]
    cells = [name, *(NONE if value is None else form.format(value * scale) for value in values)]
    if len(values) > 1:
        times = ratio(values[-1], values[0])
        cells.append(NONE if times is None else as_times(times) + _verdict(name, times))
    return cells


def _verdict(name: str, times: float) -> str:
    """Whether so many times as much is better; nothing where neither is, or it is the same."""
    if name.startswith(_NEITHER) or f"{times:.2f}" == "1.00":
        return ""
    return " better" if (times > 1) == (name in _MORE) else " worse"
