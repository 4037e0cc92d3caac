"""A sweep on Ray: its workers make the cells, some groups at a time, and this process writes them.

Where groups run, how many at once, and what is tried again after a worker died is Ray's business.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby, islice
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from keepset import models
from keepset.bench.cell import Cell
from keepset.bench.sweep.prompts import Mode
from keepset.bench.sweep.runner import Runner
from keepset.bench.sweep.store import Store
from keepset.bench.sweep.sweep import POLL, Claim, Group, Skipped, claimed, portion_of, work
from keepset.core.nan_scores import nan_scores_refused
from keepset.errors import KeepsetError

TOGETHER = 8
"""Examples of a task that decodes which one worker is given at a time."""

Maker = Callable[[], Runner]
"""Loads the model where a worker needs it; equal ones are called once per worker."""


@dataclass(frozen=True)
class Loads:
    """Makes a `Runner`."""

    source: models.Source
    mode: Mode
    chat: bool
    temperature: float
    alone: bool = False

    def __call__(self) -> Runner:
        model, tokenizer = models.load(*self.source)
        options: dict[str, Any] = {"mode": self.mode, "chat": self.chat, "temperature": self.temperature}
        return Runner(model, tokenizer, **options, alone=self.alone)


def run(
    store: Store, groups: Sequence[Group], make: Maker, nbytes: int, on_cells: Callable[[int], None]
) -> list[Skipped]:
    """What `sweep.run` does, by the workers of a Ray cluster: the one that is set up, or one on this machine.

    A worker is given so many bytes of memory for its model and caches, and a GPU where the cluster has some.
    """

    skipped: list[Skipped] = []
    flying: dict[ray.ObjectRefGenerator[Any], list[Claim]] = {}
    parcels = _parcels(claimed(store, groups, on_cells))
    parcel: list[Claim] | None = None
    with _cluster() as (cpus, gpus):
        # What no machine has would be waited for forever.
        most = max((node["Resources"].get("memory", 0) for node in ray.nodes()), default=0)
        start = ray.remote(num_cpus=1, num_gpus=min(gpus, 1), memory=min(nbytes, int(most)), num_returns="streaming")(
            _cells
        ).remote
        while flying or parcel != []:
            # No more than will soon run: other processes may want to share.
            while len(flying) < 2 * (gpus or cpus) and (parcel := next(parcels, [])):
                flying[start(make, parcel)] = parcel
            if not flying and parcel is None:
                time.sleep(POLL)
            # One that has a cell or has ended, if there is one soon.
            for stream in ray.wait(list(flying), num_returns=1, timeout=POLL)[0] if flying else ():
                result = _next(stream, flying[stream][0][0].task.name)
                if isinstance(result, Skipped):
                    skipped.append(result)
                elif result is None:
                    for group, recipes in flying.pop(stream):
                        store.release(group.key, recipes)
                elif store.save(result):
                    on_cells(1)
    return skipped


@contextmanager
def _cluster() -> Iterator[tuple[int, int]]:
    """The cluster that this process is in or finds, or else a new one on this machine; its CPUs and GPUs."""
    mine = not ray.is_initialized()
    if mine:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        there = ray.cluster_resources()
        yield max(int(there.get("CPU", 1)), 1), int(there.get("GPU", 0))
    finally:
        if mine:
            ray.shutdown()


def _parcels(claims: Iterator[Claim | None]) -> Iterator[list[Claim] | None]:
    """What one worker is given at a time: a part of a portion. None where there is nothing for now."""
    for _, portion in groupby(claims, portion_of):
        while several := list(islice(portion, TOGETHER)):
            yield None if several[0] is None else [claim for claim in several if claim is not None]


def _cells(make: Maker, claims: Sequence[Claim]) -> Iterator[Cell | Skipped]:
    with nan_scores_refused():
        yield from (result for _, result in work(_made(make), iter(claims)))


@cache
def _made(make: Maker) -> Runner:
    return make()


def _next(stream: ray.ObjectRefGenerator[Any], task: str) -> Cell | Skipped | None:
    """What a worker has made; None at the group's end."""
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
