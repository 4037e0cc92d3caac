"""Saved contexts and the pool of a process: loading entries, and saving those of ended requests, between steps."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from jaxtyping import Int
from safetensors.torch import load, save
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.logger import init_logger

from keepset.contexts import file as context_files
from keepset.contexts.columns import dequantized
from keepset.errors import KeepsetError
from keepset.kernels.entry_format import format_of
from keepset.kernels.packed import BIAS
from keepset.kernels.page_layout import PageLayout
from keepset.paged.contexts import ContextPlacement, context_places
from keepset.recipe import Recipe, Schedule
from keepset.vllm.contexts import SavedContext
from keepset.vllm.engine_context import EngineContext

logger = init_logger(__name__)

_TAILS = 256
"""How many contexts' last entries are cached; every request gets a copy of them."""

_ENTRIES = ("keys", "values", "positions", "key_scale", "value_scale")

_PATIENCE = 0.01
"""Seconds for which a step without tokens waits for files, so that the engine's idle loop leaves time for reading."""

_BIASED = "match(streaming_llm, keep=1.0)"
"""The recipe of a file whose entries have biases and are compressed no further."""

_LOST = "lost"
"""The column in which a rank says why it has no entries of a request."""

ContextColumns = dict[str, Tensor]
"""The columns of a context's entries, packed layer after layer and head after head."""


@dataclass(frozen=True)
class LoadJob:
    """A context to load for one request.

    Attributes:
        request: the engine's name of the request.
        context: the context.
        placement: the context's place in the request's blocks.
        blocks: the request's blocks, by logical position.
        whole: whether shared pages are also filled; else only the request's own.
        found: whether the request's prompt was found to begin with the context, so that it can be computed instead.
    """

    request: str
    context: SavedContext
    placement: ContextPlacement
    blocks: list[int]
    whole: bool
    found: bool


class ContextLoader:
    """Loads contexts in one process."""

    def __init__(self, context: EngineContext, cache: Tensor) -> None:
        (self._group,), self._cache = context.groups.values(), cache
        self._events, schedule = context.events, self._group.planner.schedule
        self._block_size, self._kv_heads = schedule.block_size, schedule.kv_heads
        self._rank = get_tensor_model_parallel_rank()
        self._reader = ThreadPoolExecutor(1, "keepset-contexts")
        self._reading: list[tuple[LoadJob, Future[ContextColumns]]] = []
        self._done: set[str] = set()
        self._gone: set[str] = set()
        self._tails: OrderedDict[str, ContextColumns] = OrderedDict()

    def start(self, jobs: Sequence[LoadJob], idle: bool, ended: Collection[str]) -> None:
        """Start to fill blocks of requests; blocks that need no file are filled immediately.

        Args:
            jobs: the blocks to fill, each with its context.
            idle: whether the step has no tokens, so that there is time to wait.
            ended: requests that have ended.
        """
        self._gone |= {job.request for job, _ in self._reading} & set(ended)
        for job in jobs:
            if not job.whole and job.context.digest in self._tails:
                self._tails.move_to_end(job.context.digest)
                self._put(job, self._tails[job.context.digest])
            else:
                self._reading.append((job, self._reader.submit(self._read, job)))
        if idle:
            wait([read for _, read in self._reading], _PATIENCE)

    def finish(self) -> tuple[set[str], list[tuple[LoadJob, str]]]:
        """Return the requests whose blocks were filled since the last call, and failed jobs with the reasons."""
        failed, reading = [], []
        for job, read in self._reading:
            if not read.done():
                reading.append((job, read))
            elif (error := read.exception()) is not None:  # a broken file must not stop other requests
                failed.append((job, str(error)))
            else:
                self._arrived(job, read.result())
        self._reading = reading
        self._gone &= {job.request for job, _ in reading}
        done, self._done = self._done, set()
        return done, failed

    def _read(self, job: LoadJob) -> ContextColumns:
        stored = context_files.entries(job.context.path, job.context.digest)
        layers, format = stored, format_of(next(iter(stored.values()))["keys"].dtype)
        if format is not None and not (format.bits == 8 and self._group.holds_int8):
            pages = self._group.pages_of(0)
            bits = 8 * pages.entry_bytes / (pages.head_dim + pages.value_dim)
            kind = f"{bits:.3g} bits with scales" if pages.format is not None else pages.dtype
            logger.info("The context %s is in %d bits; its pages hold it in %s.", job.context.name, format.bits, kind)
            counts = zip(stored.items(), job.context.counts, strict=True)
            layers = {index: dequantized(columns, heads[None]) for (index, columns), heads in counts}
        before = job.context.counts[:, : self._rank * self._kv_heads].sum(1).tolist()
        entry_counts = self._counts(job).sum(1).tolist()
        totals = dict(zip(self._group.layers, job.context.counts.sum(1).tolist(), strict=True))
        if {index: len(layer["keys"]) for index, layer in layers.items()} != totals:
            raise KeepsetError(f"{str(job.context.path)!r} does not hold as many entries as it says: build it again.")
        parts = [
            (layers[index], slice(start, start + size))
            for index, start, size in zip(self._group.layers, before, entry_counts, strict=True)
        ]
        names = [name for name in parts[0][0] if name in _ENTRIES or name in self._group.columns]
        return {name: torch.cat([layer[name][part] for layer, part in parts]) for name in names}

    def _counts(self, job: LoadJob) -> Int[Tensor, "layers kv_heads"]:
        """Return the entries of this process's heads."""
        return job.context.counts[:, self._rank * self._kv_heads :][:, : self._kv_heads]

    def _arrived(self, job: LoadJob, entries: ContextColumns) -> None:
        if not job.placement.shared:
            self._put(job, entries)
            return
        chosen, _, _ = self._places(job, whole=False)
        self._tails[job.context.digest] = {name: column[chosen] for name, column in entries.items()}
        if len(self._tails) > _TAILS:
            self._tails.popitem(last=False)
        self._put(job, entries if job.whole else self._tails[job.context.digest])

    def _places(self, job: LoadJob, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
        layout = job.placement.layout(self._counts(job), self._block_size)
        return context_places(
            layout, torch.tensor(job.blocks, dtype=torch.long), self._block_size, len(self._cache), unshared=not whole
        )

    def _put(self, job: LoadJob, entries: ContextColumns) -> None:
        """Write a context's entries to the request's blocks: all of them, or those of its own blocks.

        Args:
            job: the request and its context.
            entries: columns of the entries on the host, packed layer after layer and head after head.
        """
        self._events.run()  # due events may still read freed pages that this request now has
        device, dtype = self._cache.device, self._group.pages_of(0).dtype
        _, layers, slots = self._places(job, job.whole)
        columns = {name: column.to(device) for name, column in entries.items()}
        if columns["keys"].is_floating_point():
            columns |= {name: columns[name].to(dtype) for name in ("keys", "values")}
        self._group.write_context(columns, layers.to(device), slots.to(device))
        layout = job.placement.layout(self._counts(job), self._block_size)
        newest = job.blocks[(job.placement.tokens - 1) // self._block_size]
        if job.request not in self._gone:
            layout = PageLayout(*(part.to(device) for part in layout))
            self._group.planner.begin(job.request, newest, layout, job.context.plan)
        self._done.add(job.request)


def at_rest(recipe: str | None, answered: bool) -> Recipe:
    """Return the recipe of a saved file: all tokens so far count as its prompt, at whose end nothing is compressed.

    Args:
        recipe: the recipe by which the request was compressed; None if it was not compressed.
        answered: whether they include tokens of an answer, which `protect_prompt` does not cover.
    """
    if recipe is None:
        return Recipe.parse("streaming_llm(keep=1.0)")
    parsed = Recipe.parse(recipe)
    budget = replace(parsed.budget, protect_prompt=parsed.budget.protect_prompt and not answered)
    return replace(parsed, budget=budget, schedule=Schedule(every=parsed.schedule.every))


@dataclass(frozen=True)
class SaveJob:
    """A request that has ended, whose blocks wait to be saved.

    Attributes:
        request: the engine's name of the request.
        path: the file to write.
        recipe: the recipe of the saved file.
        model: the name of the model.
        fingerprint: the model's fingerprint.
        tokens: the request's token ids.
        next_event: number of tokens at which the recipe compresses next; None if it does not.
        blocks: the request's blocks, by logical position.
    """

    request: str
    path: Path
    recipe: str
    model: str
    fingerprint: dict[str, str] = field(repr=False)
    tokens: list[int] = field(repr=False)
    next_event: int | None
    blocks: list[int]


class ContextSaver:
    """Saves requests in a process that computes. The first of several ranks writes the heads of all."""

    def __init__(self, context: EngineContext) -> None:
        (self._group,) = context.groups.values()
        self._events = context.events
        self._writer = ThreadPoolExecutor(1, "keepset-saves")
        self._writing: list[tuple[str, Future[None]]] = []

    def start(self, jobs: Sequence[SaveJob], idle: bool) -> None:
        """Copy the entries of ended requests, and start to write them; an `idle` step waits until all are written.

        Args:
            jobs: the ended requests.
            idle: whether the step computes nothing.
        """
        if jobs:
            self._events.run()
        for job in jobs:
            self._writing.append((job.request, self._writer.submit(self._write, job, self._left(job))))
        if idle:
            wait([written for _, written in self._writing])

    def _left(self, job: SaveJob) -> list[dict[int, context_files.Columns] | str]:
        """Return every rank's entries of a request, or why it has none; an empty list if another rank writes."""
        try:
            exported: dict[int, context_files.Columns] | str = self._group.export_request(job.blocks, len(job.tokens))
        except RuntimeError as error:
            exported = str(error)
        ranks = get_tp_group()
        if ranks.world_size == 1:
            return [exported]
        return [_unpacked(part) for part in _gathered(_packed(exported), ranks)]

    def finish(self) -> set[str]:
        """Return the requests that were written or failed since the last call; their blocks may be freed."""
        done = {name for name, written in self._writing if written.done()}
        for name, written in self._writing:
            if written.done() and (error := written.exception()) is not None:
                logger.error("Request %s: not saved: %s", name, error)
        self._writing = [(name, written) for name, written in self._writing if name not in done]
        return done

    @staticmethod
    def _write(job: SaveJob, parts: Sequence[dict[int, context_files.Columns] | str]) -> None:
        if lost := [part for part in parts if isinstance(part, str)]:
            raise KeepsetError(lost[0])
        whole = [part for part in parts if not isinstance(part, str)]
        if not whole:
            return
        layers = {
            layer: {name: torch.cat([part[layer][name] for part in whole]) for name in columns}
            for layer, columns in whole[0].items()
        }
        job.path.parent.parent.mkdir(mode=0o700, exist_ok=True)  # only this server may read conversations
        job.path.parent.mkdir(exist_ok=True)
        recipe, next_event = job.recipe, job.next_event
        if not Recipe.parse(recipe).method.traits.biased:  # entries have biases only if they come from a context
            biases = [columns.pop(BIAS) for columns in layers.values() if BIAS in columns]
            if any(bias.any() for bias in biases):
                recipe, next_event = _BIASED, None
                for columns, bias in zip(layers.values(), biases, strict=True):
                    columns[BIAS] = bias
        context_files.save_entries(job.path, recipe, job.model, job.fingerprint, job.tokens, next_event, layers)


def _packed(part: dict[int, context_files.Columns] | str) -> Tensor:
    """Return a rank's entries, or why it has none, as bytes."""
    if isinstance(part, str):
        columns = {_LOST: torch.tensor(list(part.encode()), dtype=torch.uint8)}
    else:
        columns = {
            f"{layer} {name}": column for layer, layer_columns in part.items() for name, column in layer_columns.items()
        }
    return torch.frombuffer(bytearray(save(columns)), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> dict[int, context_files.Columns] | str:
    columns = load(packed.numpy().tobytes())
    if _LOST in columns:
        return bytes(columns[_LOST].tolist()).decode()
    part: dict[int, context_files.Columns] = defaultdict(dict)
    for title, column in columns.items():
        layer, _, name = title.partition(" ")
        part[int(layer)][name] = column
    return part


def _gathered(packed: Tensor, ranks: GroupCoordinator) -> list[Tensor]:
    """Return every rank's bytes on the first rank, and an empty list on others.

    Args:
        packed: this rank's bytes.
        ranks: the processes that take part.
    """
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.world_size)]
    torch.distributed.all_gather(sizes, torch.tensor([len(packed)], dtype=torch.long), ranks.cpu_group)
    room = packed.new_zeros(max(map(int, sizes)))
    room[: len(packed)] = packed
    parts = [torch.empty_like(room) for _ in sizes] if ranks.is_first_rank else []
    torch.distributed.gather(room, parts or None, ranks.first_rank, ranks.cpu_group)
    return [part[: int(size)] for part, size in zip(parts, sizes, strict=False)]
