"""Counters over all processes of an engine: for `/metrics`, and for programs that run vLLM offline.

Every process that compresses or frees adds to a small file of its own, in a folder that the front process names in the
environment before it starts the others. To read counters the files are added up. No process sends or waits.
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
"""The counters, and what each counts."""

_RECIPE = "recipe"

REQUESTS = 1024
"""How many of the newest requests are kept."""

CONTEXTS = 1024
"""The number of contexts whose requests are counted."""

_COUNTER = np.dtype([(name, "f8") for name in COUNTERS])
_REQUEST = np.dtype(
    [("number", "i8"), ("name", "S96"), ("prompt", "i8"), ("tokens", "i8"), ("dropped", "i8"), ("blocks_freed", "i8")]
)

_CONTEXT = np.dtype([("name", "S255"), ("requests", "i8"), ("loads", "i8")])


REFUSALS = 1024
"""How many of the newest refusals are kept for the front end to read."""

_SENTENCE = 1000
_REFUSAL = np.dtype([("number", "i8"), ("ticket", "S32"), ("why", f"S{_SENTENCE}")])


def count(**more: float) -> None:
    """Add to this process's counters, which are given by name."""
    counters = _array("counters", _COUNTER, 1)
    shared = _shared_metrics()
    for name, value in more.items():
        counters[name] += value
        if name in shared:
            shared[name].inc(value)


@cache
def _shared_metrics() -> dict[str, Any]:
    """Return counters in files of Prometheus' client, which adds them up for several API servers."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return {}
    from prometheus_client.values import MultiProcessValue

    # In a file of its own, whatever else of this process is counted.
    value = MultiProcessValue(lambda: f"keepset-{os.getpid()}")
    return {
        name: value("counter", f"keepset:{name}", f"keepset:{name}_total", (), (), text)
        for name, text in COUNTERS.items()
    }


def ended(name: str, prompt: int, tokens: int, dropped: int, blocks_freed: int) -> None:
    """Note a request that ended or was preempted, as the first group of layers saw it."""
    rows = _array("requests", _REQUEST, REQUESTS)
    number = int(rows["number"].max())
    rows[number % REQUESTS] = (number + 1, name.encode()[:96], prompt, tokens, dropped, blocks_freed)


def serving(recipe: str) -> None:
    """Note which recipe this engine serves."""
    if FOLDER in os.environ:
        path = Path(os.environ[FOLDER]) / _RECIPE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe, encoding="utf-8")


def context_used(name: str, loaded: bool) -> None:
    """Count a request that begins with a context; `loaded` says whether its pages came from the file."""
    rows = _array("contexts", _CONTEXT, CONTEXTS)
    places = np.flatnonzero((rows["name"] == name.encode()) | (rows["name"] == b""))
    if len(places):
        rows[places[0]] = (name.encode(), rows["requests"][places[0]] + 1, rows["loads"][places[0]] + loaded)


def contexts() -> dict[str, dict[str, int]]:
    """Return by context how many `requests` it has had, and how many `loads` from its file."""
    rows = [row for row in _rows("contexts", _CONTEXT) if row["name"]]
    return {row["name"].decode(): {name: int(row[name]) for name in ("requests", "loads")} for row in rows}


def refused(ticket: str, why: str) -> None:
    """Note why a request is refused, for the front end that has given it this ticket."""
    if ticket:
        rows = _array("refusals", _REFUSAL, REFUSALS)
        number = int(rows["number"].max())
        rows[number % REFUSALS] = (number + 1, ticket.encode(), why.encode(errors="replace")[:_SENTENCE])


def refusal(ticket: str) -> str | None:
    """Return why the request of a ticket was refused; None if it was not, or by an engine on another machine."""
    said = (row["why"] for row in _rows("refusals", _REFUSAL) if row["ticket"] == ticket.encode())
    why = next(said, None)
    return None if why is None else why.decode(errors="ignore")


def name_folder() -> None:
    """Name the folder for this process and those that it starts. It is deleted when this process ends."""
    if FOLDER in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"keepset-{os.getpid()}-{os.urandom(4).hex()}"
    os.environ[FOLDER] = str(folder)
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)


@cache
def _array(name: str, dtype: np.dtype, length: int) -> np.ndarray:
    """Return an array of zeros of this process: in a file, or in memory if no folder is named."""
    if FOLDER not in os.environ:
        return np.zeros(length, dtype)
    path = Path(os.environ[FOLDER]) / f"{name}-{os.getpid()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return np.memmap(path, dtype=dtype, mode="w+", shape=(length,))


def _rows(name: str, dtype: np.dtype) -> list[Any]:
    """Return the rows of all processes' files."""
    files = sorted(Path(os.environ[FOLDER]).glob(f"{name}-*")) if FOLDER in os.environ else []
    return [row for file in files for row in np.fromfile(file, dtype=dtype)]


def totals() -> dict[str, float]:
    """Return all counters, added up over the processes of this engine."""
    rows = _rows("counters", _COUNTER)
    return {name: float(sum(row[name] for row in rows)) for name in COUNTERS}


def requests() -> list[dict[str, Any]]:
    """The newest requests that ended, oldest first, for who runs vLLM offline.

    Each with `request`, the id that vLLM gave it (yours, and a suffix), its `prompt` and `tokens`, how many of
    them the average KV head had `dropped` (where the data decide, that is not known here), and the `blocks_freed`;
    where layers differ, of the first group of layers. A request that was preempted has an entry for each time.
    """
    return [
        {"request": row["name"].decode(errors="replace")}
        | {name: int(row[name]) for name in ("prompt", "tokens", "dropped", "blocks_freed")}
        for row in sorted(_rows("requests", _REQUEST), key=lambda row: int(row["number"]))
        if row["number"]
    ]


class PrometheusCollector:
    """The counters as Prometheus metrics, `keepset:<name>_total`, beside vLLM's own; none without a recipe."""

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, as Prometheus' client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        folder = os.environ.get(FOLDER)
        has_recipe = folder is not None and (path := Path(folder) / _RECIPE).exists()
        if has_recipe:
            served = GaugeMetricFamily("keepset:recipe", "The recipe that is served.", labels=["recipe"])
            served.add_metric([path.read_text(encoding="utf-8")], 1.0)
            yield served
        # From the start on: a rate of what is missing is no rate of 0.
        if has_recipe or _rows("counters", _COUNTER):
            for name, value in totals().items():
                yield CounterMetricFamily(f"keepset:{name}", COUNTERS[name], value=value)


@cache
def expose() -> None:
    """Add the counters to the metrics that this process serves at `/metrics`, if it does."""
    from prometheus_client import REGISTRY

    REGISTRY.register(PrometheusCollector())  # type: ignore[arg-type]
