"""Counters over all processes of an engine: for `/metrics`, and for programs that run vLLM offline.

Every process that compresses or frees adds to its own small file, in a folder that the front process names in the
environment before it starts the others. A reader adds up the files. No process sends or waits.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "KEEPSET_STATS_DIR"

COUNTERS = {
    "events": "Compressions of requests.",
    "entries_kept": "Entries that compressions kept, over layers and KV heads.",
    "entries_dropped": "Entries that compressions dropped, over layers and KV heads.",
    "blocks_freed": "KV-cache blocks that compressions returned to the pool.",
    "seconds": "Seconds that compressions took.",
    "turns": "Requests that went on with a conversation.",
    "tokens_reused": "Tokens of their prompts that were not computed.",
    "tokens_left_out": "Tokens of conversations that clients have left out of later prompts.",
    "conversations_lost": "Conversations whose pages were given to other requests, and that are nowhere else.",
    "conversations_spilled": "Conversations whose pages were written to a file in time.",
    "conversations_read": "Conversations that were read back from their file.",
    "conversations_evicted": "Conversations whose file was deleted because the files took too many bytes.",
}
"""The counters with their descriptions."""

_RECIPE = "recipe"

_ROWS = 1024
"""How many of the newest requests and refusals are kept, and how many contexts are counted."""

_COUNTER = np.dtype([(name, "f8") for name in COUNTERS])
_REQUEST = np.dtype(
    [("number", "i8"), ("name", "S96"), ("prompt", "i8"), ("tokens", "i8"), ("dropped", "i8"), ("blocks_freed", "i8")]
)

_CONTEXT = np.dtype([("name", "S255"), ("requests", "i8"), ("loads", "i8")])

_IN_FRONT = np.dtype([("number", "i8"), ("ticket", "S32"), ("tokens", "i8"), ("prompt", "i8")])

_TURNS = 2**13
"""How many of the newest requests to a server of conversations are kept: those that may still be answered."""
_TURN_FIELDS = ("computed", "reused", "dropped", "held")
_TURN = np.dtype([("number", "i8"), ("ticket", "S32"), *((name, "i8") for name in _TURN_FIELDS)])

_SENTENCE = 1000
_REFUSAL = np.dtype([("number", "i8"), ("ticket", "S32"), ("why", f"S{_SENTENCE}")])


def count(**increments: float) -> None:
    """Add to this process's counters, which are given by name."""
    counters = _array("counters", _COUNTER, 1)
    shared = _shared_metrics()
    for name, value in increments.items():
        counters[name] += value
        if name in shared:
            shared[name].inc(value)


@cache
def _shared_metrics() -> dict[str, Any]:
    """Return counters in files of Prometheus' client, which sums them over several API servers."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return {}
    from prometheus_client.values import MultiProcessValue

    # In a file of its own, apart from this process's other counters.
    value = MultiProcessValue(lambda: f"keepset-{os.getpid()}")
    return {
        name: value("counter", f"keepset:{name}", f"keepset:{name}_total", (), (), text)
        for name, text in COUNTERS.items()
    }


def ended(name: str, prompt: int, tokens: int, dropped: int, blocks_freed: int) -> None:
    """Note a request that ended or was preempted, with the figures of the first group of layers.

    Args:
        name: the engine's name of the request.
        prompt: tokens of its prompt.
        tokens: its tokens when it ended.
        dropped: entries that the average KV head has lost.
        blocks_freed: blocks given back to the engine's pool before the request ended.
    """
    _append("requests", _REQUEST, name.encode()[:96], prompt, tokens, dropped, blocks_freed)


def serving(recipe: str | None) -> None:
    """Note which recipe this engine serves, with the names of its files in place of their paths; None for no recipe."""
    if FOLDER in os.environ:
        path = Path(os.environ[FOLDER]) / _RECIPE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("none" if recipe is None else re.sub("'[^']*/", "'", recipe), encoding="utf-8")


def context_used(name: str, loaded: bool) -> None:
    """Count a request that begins with a context; `loaded` says whether its pages came from the file.

    Args:
        name: the context's name.
        loaded: whether its pages came from the file; else they were in the cache.
    """
    rows = _array("contexts", _CONTEXT, _ROWS)
    row_indices = np.flatnonzero((rows["name"] == name.encode()) | (rows["name"] == b""))
    if len(row_indices):
        rows[row_indices[0]] = (
            name.encode(),
            rows["requests"][row_indices[0]] + 1,
            rows["loads"][row_indices[0]] + loaded,
        )


def contexts() -> dict[str, dict[str, int]]:
    """Return for each context the number of its `requests`, and of `loads` from its file."""
    rows = [row for row in _rows("contexts", _CONTEXT) if row["name"]]
    return {row["name"].decode(): {name: int(row[name]) for name in ("requests", "loads")} for row in rows}


def refused(ticket: str, why: str) -> None:
    """Note why a request is refused, for the front end that gave it this ticket.

    Args:
        ticket: the ticket; "" if the front end has not asked.
        why: the reason, one sentence, of which the first 1,000 bytes are noted.
    """
    if ticket:
        _append("refusals", _REFUSAL, ticket.encode(), why.encode(errors="replace")[:_SENTENCE])


def refusal(ticket: str) -> str | None:
    """Return why the request of a ticket was refused; None if it was not refused, or by an engine elsewhere."""
    said = (row["why"] for row in _rows("refusals", _REFUSAL) if row["ticket"] == ticket.encode())
    why = next(said, None)
    return None if why is None else why.decode(errors="ignore")


def in_front(ticket: str, tokens: int, prompt: int) -> None:
    """Note how many tokens a context has in front of the prompt of a request, and how many these are in all.

    Args:
        ticket: the request's ticket; "" if the front end has not asked.
        tokens: tokens of the context.
        prompt: tokens of the prompt, with those of the context.
    """
    if ticket:
        _append("in_front", _IN_FRONT, ticket.encode(), tokens, prompt)


def tokens_in_front(ticket: str) -> tuple[int, int]:
    """Return the tokens in front of all prompts of a ticket, and those of its newest prompt in all."""
    rows = [row for row in _rows("in_front", _IN_FRONT) if row["ticket"] == ticket.encode()]
    return sum(int(row["tokens"]) for row in rows), int(rows[-1]["prompt"]) if rows else 0


def turn(ticket: str, **figures: int) -> None:
    """Note what a request to a server of conversations has of its conversation.

    Args:
        ticket: the request's ticket; "" if the front end has not asked.
        **figures: the tokens of its prompt that are `computed` and `reused`, those of the conversation that its prompt
            does not have (`dropped`), and entries per KV head that the pages of the reused ones have room for (`held`).
    """
    if ticket:
        _append("turns", _TURN, ticket.encode(), *(figures[name] for name in _TURN_FIELDS), length=_TURNS)


def turns(ticket: str) -> dict[str, int]:
    """Return the figures of all requests of a ticket, added up; none if there is no such request, or no longer."""
    files = sorted(Path(os.environ[FOLDER]).glob("turns-*")) if FOLDER in os.environ else []
    tables = [np.fromfile(file, dtype=_TURN) for file in files]
    rows = [row for table in tables for row in table[table["ticket"] == ticket.encode()]]
    return {name: sum(int(row[name]) for row in rows) for name in _TURN_FIELDS} if rows else {}


def answer(ticket: str, content: Any) -> None:
    """Note the answer to a question of the front end.

    Args:
        ticket: the question's ticket.
        content: the answer, which JSON can say.
    """
    if FOLDER in os.environ:
        path = Path(os.environ[FOLDER]) / f"answer-{ticket}"
        with suppress(OSError):  # the engine runs on without a disk; who asks waits in vain
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}")
            unfinished.write_text(json.dumps(content), encoding="utf-8")
            unfinished.replace(path)


def reply(ticket: str) -> Any:
    """Return the answer to the question of a ticket, once; None if there is none yet."""
    path = Path(os.environ[FOLDER]) / f"answer-{ticket}" if FOLDER in os.environ else None
    if path is None or not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return content


def name_folder() -> None:
    """Make the folder for this process and those that it starts. It is deleted when this process ends."""
    if FOLDER in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"keepset-{os.getpid()}-{os.urandom(4).hex()}"
    os.environ[FOLDER] = str(folder)
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)


@cache
def _array(name: str, dtype: np.dtype, length: int) -> np.ndarray:
    """Return this process's array of zeros: in a file, or in memory if no folder is named.

    Args:
        name: what the rows are about, which begins the file's name.
        dtype: the type of a row.
        length: the number of rows.
    """
    if FOLDER not in os.environ:
        return np.zeros(length, dtype)
    path = Path(os.environ[FOLDER]) / f"{name}-{os.getpid()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return np.memmap(path, dtype=dtype, mode="w+", shape=(length,))


def _append(name: str, dtype: np.dtype, *values: Any, length: int = _ROWS) -> None:
    """Write a numbered row in place of this process's oldest one.

    Args:
        name: what the rows are about.
        dtype: the type of a row.
        *values: the row's fields behind its number.
        length: how many rows are kept.
    """
    rows = _array(name, dtype, length)
    number = int(rows["number"].max())
    rows[number % length] = (number + 1, *values)


def _rows(name: str, dtype: np.dtype) -> list[Any]:
    files = sorted(Path(os.environ[FOLDER]).glob(f"{name}-*")) if FOLDER in os.environ else []
    return [row for file in files for row in np.fromfile(file, dtype=dtype)]


def totals() -> dict[str, float]:
    """Return all counters, added up over the processes of this engine."""
    rows = _rows("counters", _COUNTER)
    return {name: float(sum(row[name] for row in rows)) for name in COUNTERS}


def requests() -> list[dict[str, Any]]:
    """Return the newest requests that ended, oldest first, for programs that run vLLM offline.

    Each has its `request` id from vLLM (yours, and a suffix), its numbers of `prompt` tokens and all `tokens`, how many
    of them the average KV head had `dropped` (unknown if counts come from the data), and its `blocks_freed`. If layers
    differ, the figures are those of the first group. A preempted request has an entry for each time.
    """
    return [
        {"request": row["name"].decode(errors="replace")}
        | {name: int(row[name]) for name in ("prompt", "tokens", "dropped", "blocks_freed")}
        for row in sorted(_rows("requests", _REQUEST), key=lambda row: int(row["number"]))
        if row["number"]
    ]


class PrometheusCollector:
    """The counters as Prometheus metrics `keepset:<name>_total`, beside vLLM's own; none without a recipe."""

    def collect(self) -> Iterator[Any]:
        """Yield the metrics for Prometheus' client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        folder = os.environ.get(FOLDER)
        has_recipe = folder is not None and (path := Path(folder) / _RECIPE).exists()
        if has_recipe:
            served = GaugeMetricFamily("keepset:recipe", "The recipe that is served.", labels=["recipe"])
            served.add_metric([path.read_text(encoding="utf-8")], 1.0)
            yield served
        # From the start, because the rate of a missing counter is missing, not 0.
        if has_recipe or _rows("counters", _COUNTER):
            for name, value in totals().items():
                yield CounterMetricFamily(f"keepset:{name}", COUNTERS[name], value=value)


@cache
def expose() -> None:
    """Add the counters to the metrics that this process serves at `/metrics`, if it serves any."""
    from prometheus_client import REGISTRY

    REGISTRY.register(PrometheusCollector())  # type: ignore[arg-type]
