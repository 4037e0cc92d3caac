"""Counters that leave the engine's processes: for `/metrics`, and for who runs vLLM offline.

Every process that compresses or frees adds to a small file of its own, in a folder that the front process names in
the environment before it starts the others; reading is adding the files up. Nothing is sent, nothing waits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


class Stats:
    """This process's counters."""

    def __init__(self, path: Path | None) -> None:
        if path is None:
            self._values: np.ndarray = np.zeros(len(COUNTERS))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._values = np.memmap(path, dtype=np.float64, mode="w+", shape=(len(COUNTERS),))

    def compressed(self, events: int, kept: int, dropped: int, seconds: float) -> None:
        """One layer has compressed; `events` counts requests once, not once a layer."""
        self._values[0] += events
        self._values[1] += kept
        self._values[2] += dropped
        self._values[4] += seconds

    def freed(self, blocks: int) -> None:
        """Blocks went back to the pool."""
        self._values[3] += blocks


def name_folder() -> None:
    """Says where this process and those that it starts will count."""
    os.environ.setdefault(FOLDER, str(Path(tempfile.gettempdir()) / f"keepset-{os.getpid()}-{os.urandom(4).hex()}"))


def _file(role: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    return None if folder is None else Path(folder) / f"{role}-{os.getpid()}.f64"


@cache
def scheduler_stats() -> Stats:
    """Of the process that schedules."""
    return Stats(_file("scheduler"))


@cache
def worker_stats() -> Stats:
    """Of a process that computes; of several ranks, only the first counts."""
    return Stats(_file("worker"))


def totals() -> dict[str, float]:
    """All counters, over all processes of this engine."""
    folder = os.environ.get(FOLDER)
    files = sorted(Path(folder).glob("*.f64")) if folder else []
    sums = np.zeros(len(COUNTERS))
    for file in files:
        values = np.fromfile(file, dtype=np.float64)
        if values.shape == sums.shape:
            sums += values
    return dict(zip(COUNTERS, sums.tolist(), strict=True))


def prometheus() -> Iterator[object]:
    """The counters as Prometheus metrics, `keepset:<name>_total`."""
    from prometheus_client.core import CounterMetricFamily

    for name, value in totals().items():
        yield CounterMetricFamily(f"keepset:{name}", COUNTERS[name], value=value)
