"""A sweep on Ray: its workers compute the cells, some groups at a time, and this process writes them.

Ray decides where and how many groups run, and which are tried again after a worker has died.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby, islice
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from keepset import models
from keepset.core.select import nan_scores_refused
from keepset.errors import KeepsetError
from keepset.lab.embedded import Source
from keepset.lab.record import Record
from keepset.lab.sweep.runner import Runner
from keepset.lab.sweep.store import Store
from keepset.lab.sweep.sweep import Group, Skipped, portion_of, work

TOGETHER = 8
"""Examples that a worker gets at a time, for a task that decodes."""
_POLL = 1.0
"""Seconds of waiting for a cell between checks for Ctrl-C."""

MakeRunner = Callable[[], Runner]
"""Loads the model in a worker. Equal ones are called once per worker."""


@dataclass(frozen=True)
class RunnerSource:
    """Makes a `Runner` in a worker, from the model's source and the runner's options by name."""

    source: Source
    options: tuple[tuple[str, Any], ...]

    def __call__(self) -> Runner:
        return Runner(*models.load(*self.source), **dict(self.options))


def run(
    store: Store, groups: Sequence[Group], make: MakeRunner, nbytes: int, on_cell: Callable[[], None]
) -> list[Skipped]:
    """Compute and write all cells like `sweep.run`, with the workers of a Ray cluster.

    It is the cluster of this process, or one that Ray finds; else one is started on this machine.

    Args:
        store: the sweep's file.
        groups: the groups, see `sweep.unfinished`.
        make: loads the model in a worker.
        nbytes: bytes of memory that a worker needs for its model and caches. It also gets a GPU if there is one.
        on_cell: called for each written cell.

    Returns:
        The cells that are missing for lack of memory, or because a worker ended.
    """
    skipped: list[Skipped] = []
    running: dict[ray.ObjectRefGenerator[Any], str] = {}
    parcels = _parcels(groups)
    with _cluster() as (cpus, gpus):
        # Ray would wait forever for more memory than any machine has.
        most = max((node["Resources"].get("memory", 0) for node in ray.nodes()), default=0)
        memory = min(nbytes, int(most))
        start = ray.remote(num_cpus=1, num_gpus=min(gpus, 1), memory=memory, num_returns="streaming")(_cells).remote
        while True:
            # Only as many tasks as will run soon, so that other users of the cluster get their turn.
            for parcel in islice(parcels, max(0, 2 * (gpus or cpus) - len(running))):
                running[start(make, parcel)] = parcel[0].task.name
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


def _parcels(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Yield the groups that a worker gets at a time: at most `TOGETHER` of a portion."""
    for _, portion in groupby(groups, portion_of):
        while parcel := list(islice(portion, TOGETHER)):
            yield parcel


def _cells(make: MakeRunner, parcel: Sequence[Group]) -> Iterator[Record | Skipped]:
    with nan_scores_refused():
        yield from work(_made(make), parcel)


@cache
def _made(make: MakeRunner) -> Runner:
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
