"""A sweep on Ray: its workers compute the cells, a portion at a time, and this process writes them.

Ray decides where and how many portions run, and which are tried again after a worker has died.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from keepset import models
from keepset.core.select import nan_scores_refused
from keepset.errors import KeepsetError
from keepset.lab.embedded import Source
from keepset.lab.record import Record
from keepset.lab.sweep.engine import Engine, Portion, Skipped
from keepset.lab.sweep.prompts import Asking
from keepset.lab.sweep.store import Store

TOGETHER = 8
"""Examples that a worker gets at a time, for a task that decodes."""
_POLL = 1.0
"""Seconds of waiting for a cell between checks for Ctrl-C."""

MakeEngine = Callable[[], Engine]
"""Loads the model in a worker. Equal ones are called once per worker."""


@dataclass(frozen=True)
class EngineSource:
    """Makes an `Engine` in a worker, from the model's source and how it asks."""

    source: Source
    asking: Asking

    def __call__(self) -> Engine:
        return Engine(*models.load(*self.source), self.asking)


def run(
    store: Store, portions: Sequence[Portion], make: MakeEngine, nbytes: int, on_cell: Callable[[], None]
) -> list[Skipped]:
    """Compute and write all cells like `sweep.run`, with the workers of a Ray cluster.

    It is the cluster of this process, or one that Ray finds; else one is started on this machine.

    Args:
        store: the sweep's file.
        portions: the cells, see `sweep.unfinished`.
        make: loads the model in a worker.
        nbytes: bytes of memory that a worker needs for its model and caches. It also gets a GPU if there is one.
        on_cell: called for each written cell.

    Returns:
        The cells that are missing for lack of memory, or because a worker ended.
    """
    skipped: list[Skipped] = []
    running: dict[ray.ObjectRefGenerator[Any], str] = {}
    parcels = _parcels(portions)
    with _cluster() as (cpus, gpus):
        # Ray would wait forever for more memory than any machine has.
        most = max((node["Resources"].get("memory", 0) for node in ray.nodes()), default=0)
        memory = min(nbytes, int(most))
        start = ray.remote(num_cpus=1, num_gpus=min(gpus, 1), memory=memory, num_returns="streaming")(_cells).remote
        while True:
            # Only as many tasks as will run soon, so that other users of the cluster get their turn.
            for parcel in islice(parcels, max(0, 2 * (gpus or cpus) - len(running))):
                running[start(make, parcel)] = parcel.task.name
            if not running:
                return skipped
            for stream in ray.wait(list(running), num_returns=1, timeout=_POLL)[0]:
                result = _next(stream, running[stream])
                if isinstance(result, Skipped):
                    skipped.append(result)
                elif result is None:
                    del running[stream]
                elif store.save(result):
                    on_cell()


@contextmanager
def _cluster() -> Iterator[tuple[int, int]]:
    """Connect to a cluster, or start one on this machine; yield its numbers of CPUs and GPUs."""
    started = not ray.is_initialized()
    if started:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        resources = ray.cluster_resources()
        yield max(int(resources.get("CPU", 1)), 1), int(resources.get("GPU", 0))
    finally:
        if started:
            ray.shutdown()


def _parcels(portions: Sequence[Portion]) -> Iterator[Portion]:
    """Yield what a worker gets at a time: at most `TOGETHER` examples of a portion."""
    for portion in portions:
        for start in range(0, len(portion.examples), TOGETHER):
            yield replace(portion, examples=portion.examples[start : start + TOGETHER])


def _cells(make: MakeEngine, portion: Portion) -> Iterator[Record | Skipped]:
    with nan_scores_refused():
        yield from _made(make).answer(portion)


@cache
def _made(make: MakeEngine) -> Engine:
    return make()


def _next(stream: ray.ObjectRefGenerator[Any], task: str) -> Record | Skipped | None:
    """Return a worker's next result of a task; None at the parcel's end."""
    try:
        return ray.get(next(stream))
    except StopIteration:
        return None
    except RayTaskError as error:
        if isinstance(error.cause, KeepsetError):
            raise error.cause from None
        raise
    except RayError as error:
        return Skipped(task, "the rest of an example", f"its worker is gone ({type(error).__name__})")
