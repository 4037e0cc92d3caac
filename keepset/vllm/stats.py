"""Counters that leave the engine's processes: for `/metrics`, and for who runs vLLM offline.

Every process that compresses or frees adds to a small file of its own, in a folder that the front process names in
the environment before it starts the others; reading is adding the files up. Nothing is sent, nothing waits.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
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
}
"""What is counted, in the order of the files."""


REQUESTS = 1024
"""How many of the newest requests are remembered."""

_REQUEST = np.dtype(
    [("number", "i8"), ("name", "S96"), ("prompt", "i8"), ("tokens", "i8"), ("dropped", "i8"), ("blocks_freed", "i8")]
)


class Stats:
    """This process's counters, in memory where no folder is named."""

    def __init__(self, path: Path | None) -> None:
        self._values = _array(path, len(COUNTERS), np.dtype(np.float64))

    def compressed(self, events: int, kept: int, dropped: int, seconds: float) -> None:
        """One layer has compressed; `events` counts requests once, not once a layer."""
        self._values[0] += events
        self._values[1] += kept
        self._values[2] += dropped
        self._values[4] += seconds

    def freed(self, blocks: int) -> None:
        """Blocks went back to the pool."""
        self._values[3] += blocks


class Requests:
    """A ring of the newest requests that ended."""

    def __init__(self, path: Path | None) -> None:
        self._number, self._rows = 0, _array(path, REQUESTS, _REQUEST)

    def ended(self, name: str, prompt: int, tokens: int, dropped: int, blocks_freed: int) -> None:
        """A request ended or was preempted, as the first group of layers saw it."""
        row = (self._number + 1, name.encode()[:96], prompt, tokens, dropped, blocks_freed)
        self._rows[self._number % REQUESTS] = row
        self._number += 1


def name_folder() -> None:
    """Says where this process and those that it starts will count; the folder goes when this process does."""
    if FOLDER in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"keepset-{os.getpid()}-{os.urandom(4).hex()}"
    os.environ[FOLDER] = str(folder)
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)


def _array(path: Path | None, length: int, dtype: np.dtype) -> np.ndarray:
    """Zeros, in the file where there is one."""
    if path is None:
        return np.zeros(length, dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    return np.memmap(path, dtype=dtype, mode="w+", shape=(length,))


def _file(name: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    return None if folder is None else Path(folder) / f"{name}-{os.getpid()}"


@cache
def scheduler_stats() -> Stats:
    """Of the process that schedules."""
    return Stats(_file("scheduler"))


@cache
def worker_stats() -> Stats:
    """Of a process that computes; of several ranks, only the first counts."""
    return Stats(_file("worker"))


@cache
def request_stats() -> Requests:
    """Of the process that schedules."""
    return Requests(_file("requests"))


def totals() -> dict[str, float]:
    """All counters, over all processes of this engine."""
    sums = np.zeros(len(COUNTERS))
    for file in (*_files("scheduler"), *_files("worker")):
        values = np.fromfile(file, dtype=np.float64)
        if values.shape == sums.shape:
            sums += values
    return dict(zip(COUNTERS, sums.tolist(), strict=True))


def requests() -> list[dict[str, Any]]:
    """The newest requests that ended, oldest first, for who runs vLLM offline.

    Each with `request`, the id that vLLM gave it (yours, and a suffix), its `prompt` and `tokens`, how many of
    them the average KV head had `dropped` (where the data decide, that is not known here), and the `blocks_freed`;
    where layers differ, of the first group of layers. A request that was preempted has an entry for each time.
    """
    rows = [row for file in _files("requests") for row in np.fromfile(file, dtype=_REQUEST) if row["number"]]
    return [
        {"request": row["name"].decode(errors="replace")}
        | {name: int(row[name]) for name in ("prompt", "tokens", "dropped", "blocks_freed")}
        for row in sorted(rows, key=lambda row: int(row["number"]))
    ]


def _files(name: str) -> list[Path]:
    folder = os.environ.get(FOLDER)
    return sorted(Path(folder).glob(f"{name}-*")) if folder else []


class PrometheusCollector:
    """The counters as Prometheus metrics, `keepset:<name>_total`, beside vLLM's own; none without a recipe."""

    def collect(self) -> Iterator[Any]:
        """Reads them."""
        from prometheus_client.core import CounterMetricFamily

        if _files("scheduler") or _files("worker"):
            for name, value in totals().items():
                yield CounterMetricFamily(f"keepset:{name}", COUNTERS[name], value=value)


@cache
def expose() -> None:
    """Adds them to what this process answers at `/metrics`, if it is the one that does."""
    from prometheus_client import REGISTRY

    REGISTRY.register(PrometheusCollector())  # type: ignore[arg-type]
