"""A sweep on Ray: its workers make the cells, group by group, and this process writes them.

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
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from keepset import models
from keepset.bench.cell import Cell
from keepset.bench.sweep.prompts import Mode
from keepset.bench.sweep.runner import Runner
from keepset.bench.sweep.store import Store
from keepset.bench.sweep.sweep import POLL, Group, Skipped, claimed, work
from keepset.errors import KeepsetError

Maker = Callable[[], Runner]
"""Loads the model where a worker needs it; equal ones are called once per worker."""


@dataclass(frozen=True)
class Loads:
    """Makes a `Runner`."""

    model: str | None
    mode: Mode
    chat: bool
    temperature: float

    def __call__(self) -> Runner:
        model, tokenizer = models.load(self.model)
        return Runner(model, tokenizer, mode=self.mode, chat=self.chat, temperature=self.temperature)


def run(
    store: Store, groups: Sequence[Group], make: Maker, nbytes: int, on_cells: Callable[[int], None]
) -> list[Skipped]:
    """What `sweep.run` does, by the workers of a Ray cluster: the one that is set up, or one on this machine.

    A worker is given so many bytes of memory for its model and caches.
    """

    skipped: list[Skipped] = []
    flying: dict[ray.ObjectRefGenerator[Any], Group] = {}
    claims = claimed(store, groups, on_cells)
    claim: tuple[Group, list[str]] | tuple[()] | None = None
    with _cluster() as cpus:
        # What no machine has would be waited for forever.
        most = max((node["Resources"].get("memory", 0) for node in ray.nodes()), default=0)
        start = ray.remote(num_cpus=1, memory=min(nbytes, int(most)), num_returns="streaming")(_cells).remote
        while flying or claim != ():
            # No more than will soon run: other processes may want to share.
            while len(flying) < 2 * cpus and (claim := next(claims, ())):
                flying[start(make, *claim)] = claim[0]
            if not flying and claim is None:
                time.sleep(POLL)
            # One that has a cell or has ended, if there is one soon.
            for stream in ray.wait(list(flying), num_returns=1, timeout=POLL)[0] if flying else ():
                result = _next(stream, flying[stream].task.name)
                if isinstance(result, Skipped):
                    skipped.append(result)
                elif result is not None and store.save(result):
                    on_cells(1)
                else:
                    store.release(flying.pop(stream).key)
    return skipped


@contextmanager
def _cluster() -> Iterator[int]:
    """The cluster that this process is in or finds, or else a new one on this machine; how many CPUs it has."""
    mine = not ray.is_initialized()
    if mine:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield max(int(ray.cluster_resources().get("CPU", 1)), 1)
    finally:
        if mine:
            ray.shutdown()


def _cells(make: Maker, group: Group, recipes: Sequence[str]) -> Iterator[Cell | Skipped]:
    yield from work(_made(make), group, recipes)


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
