"""`ContextLoader`: brings the entries of saved contexts into a process's part of the pool, beside its steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank

from keepset.errors import KeepsetError
from keepset.hf import saved
from keepset.paged.contexts import ContextPlacement, EntryPlaces, context_places
from keepset.vllm.engine_context import EngineContext

_TAILS = 256
"""Contexts whose last entries are remembered, because every request is given a copy of them."""

_PATIENCE = 0.01
"""Seconds that a step without tokens waits for files, lest the engine's loop take the time that reading needs."""


class Entries(NamedTuple):
    """Keys and values of a context, layer after layer and head after head."""

    keys: Float[Tensor, "n head_dim"]
    values: Float[Tensor, "n head_dim"]


@dataclass(frozen=True)
class LoadJob:
    """A context for one request.

    Attributes:
        request: its name.
        path, digest, placement, counts: the context's.
        blocks: of the request, by logical position.
        whole: whether its shared pages are to be filled too; else its own alone.
    """

    request: str
    path: Path
    digest: str
    placement: ContextPlacement
    counts: Int[Tensor, "layers kv_heads"] = field(repr=False)
    blocks: list[int]
    whole: bool


class ContextLoader:
    """Of one process; `context` has its layers, whose pages are like those of this cache."""

    def __init__(self, context: EngineContext, cache: Tensor) -> None:
        (self._group,), self._cache = context.groups, cache
        self._events, schedule = context.events, self._group.planner.schedule
        self._block_size, self._kv_heads = schedule.block_size, schedule.kv_heads
        self._rank = get_tensor_model_parallel_rank()
        self._reader = ThreadPoolExecutor(1, "keepset-contexts")
        self._reading: list[tuple[LoadJob, Future[Entries]]] = []
        self._done: set[str] = set()
        self._tails: OrderedDict[str, Entries] = OrderedDict()

    def start(self, jobs: Sequence[LoadJob], idle: bool) -> None:
        """Fills the blocks of requests, at once where nothing has to be read; `idle`: there is nothing else to do."""
        for job in jobs:
            if not job.whole and job.digest in self._tails:
                self._tails.move_to_end(job.digest)
                self._put(job, self._tails[job.digest])
            else:
                self._reading.append((job, self._reader.submit(self._read, job)))
        if idle:
            wait([read for _, read in self._reading], _PATIENCE)

    def finish(self) -> tuple[set[str], dict[str, str]]:
        """Requests whose blocks have been filled since it was asked last, and why others' cannot be."""
        failed, reading = {}, []
        for job, read in self._reading:
            if not read.done():
                reading.append((job, read))
            elif (error := read.exception()) is not None:  # whatever is wrong with a file, the others are served
                failed[job.request] = str(error)
            else:
                self._arrived(job, read.result())
        self._reading = reading
        done, self._done = self._done, set()
        return done, failed

    def _read(self, job: LoadJob) -> Entries:
        layers = saved.entries(job.path, job.digest)
        before = job.counts[:, : self._rank * self._kv_heads].sum(1).tolist()
        own = self._counts(job).sum(1).tolist()
        totals = dict(zip(self._group.layers, job.counts.sum(1).tolist(), strict=True))
        if {index: len(layer["keys"]) for index, layer in layers.items()} != totals:
            raise KeepsetError(f"{str(job.path)!r} does not hold as many entries as it says: build it again.")
        parts = [
            (layers[index], slice(start, start + size))
            for index, start, size in zip(self._group.layers, before, own, strict=True)
        ]
        return Entries(*(torch.cat([layer[name][part] for layer, part in parts]) for name in ("keys", "values")))

    def _counts(self, job: LoadJob) -> Int[Tensor, "layers kv_heads"]:
        """Of this process's heads."""
        return job.counts[:, self._rank * self._kv_heads :][:, : self._kv_heads]

    def _arrived(self, job: LoadJob, entries: Entries) -> None:
        chosen = self._places(job, whole=False).chosen
        self._tails[job.digest] = Entries(*(part[chosen] for part in entries))
        if len(self._tails) > _TAILS:
            self._tails.popitem(last=False)
        self._put(job, entries if job.whole else self._tails[job.digest])

    def _places(self, job: LoadJob, whole: bool) -> EntryPlaces:
        layout = job.placement.layout(self._counts(job), self._block_size)
        return context_places(layout, torch.tensor(job.blocks), self._block_size, len(self._cache), own=not whole)

    def _put(self, job: LoadJob, entries: Entries) -> None:
        """Writes entries to the request's blocks; they are all of its context's, or those of its own blocks."""
        self._events.run()  # those that are due may still read pages that were freed and are this request's now
        device, to = self._cache.device, self._cache
        _, layers, slots = self._places(job, job.whole)
        self._group.put(entries.keys.to(to), entries.values.to(to), layers.to(device), slots.to(device))
        layout = job.placement.layout(self._counts(job), self._block_size)
        newest = job.blocks[(job.placement.tokens - 1) // self._block_size]
        self._group.planner.begin(newest, type(layout)(*(part.to(device) for part in layout)))
        self._done.add(job.request)
