"""`ContextSaver`: saves the entries of ended requests to files while the engine runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.logger import init_logger

from keepset.contexts import file as context_files
from keepset.core.observation import BIAS
from keepset.errors import KeepsetError
from keepset.recipe import Recipe, Schedule
from keepset.vllm.engine_context import EngineContext

logger = init_logger(__name__)

_BIASED = "match(streaming_llm, keep=1.0)"
"""The recipe of a file whose entries have biases and are compressed no further."""


def at_rest(recipe: str | None, answered: bool) -> str:
    """Return the recipe of a saved file: all tokens so far count as its prompt, which is not compressed again.

    Args:
        recipe: the recipe by which the request was compressed; None if it was not compressed.
        answered: whether they include tokens of an answer, which `protect_prompt` does not cover.
    """
    if recipe is None:
        return "streaming_llm(keep=1.0)"
    parsed = Recipe.parse(recipe)
    budget = replace(parsed.budget, protect_prompt=parsed.budget.protect_prompt and not answered)
    return str(replace(parsed, budget=budget, schedule=Schedule(every=parsed.schedule.every)))


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
        blocks: the request's blocks, by logical position.
    """

    request: str
    path: Path
    recipe: str
    model: str
    fingerprint: dict[str, str] = field(repr=False)
    tokens: list[int] = field(repr=False)
    blocks: list[int]


class ContextSaver:
    """Saves requests in a process that computes. The first of several ranks writes the heads of all."""

    def __init__(self, context: EngineContext) -> None:
        (self._group,) = context.groups.values()
        self._events = context.events
        self._writer = ThreadPoolExecutor(1, "keepset-saves")
        self._writing: list[tuple[str, Future[None]]] = []

    def start(self, jobs: Sequence[SaveJob], idle: bool) -> None:
        """Copy the entries of ended requests, and start to write them; an `idle` step waits until all are written."""
        if jobs:
            self._events.run()
        for job in jobs:
            self._writing.append((job.request, self._writer.submit(self._write, job, self._left(job))))
        if idle:
            wait([written for _, written in self._writing])

    def _left(self, job: SaveJob) -> list[dict[int, context_files.Columns] | str]:
        """Return every rank's entries of a request, or why it has none; an empty list if another rank writes."""
        try:
            own: dict[int, context_files.Columns] | str = self._group.export_request(job.blocks, len(job.tokens))
        except RuntimeError as error:
            own = str(error)
        ranks = get_tp_group()
        if ranks.world_size == 1:
            return [own]
        return [_unpacked(part) for part in _gathered(_packed(own), ranks)]

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
        recipe = job.recipe
        if not Recipe.parse(recipe).method.traits.biased:  # entries have biases only if they come from a context
            biases = [columns.pop(BIAS) for columns in layers.values() if BIAS in columns]
            if any(bias.any() for bias in biases):
                recipe = _BIASED
                for columns, bias in zip(layers.values(), biases, strict=True):
                    columns[BIAS] = bias
        context_files.save_entries(job.path, recipe, job.model, job.fingerprint, job.tokens, layers)


_LOST = "lost"


def _packed(part: dict[int, context_files.Columns] | str) -> Tensor:
    """Return a rank's entries, or why it has none, as bytes."""
    if isinstance(part, str):
        columns = {_LOST: torch.tensor(list(part.encode()), dtype=torch.uint8)}
    else:
        columns = {f"{layer} {name}": column for layer, own in part.items() for name, column in own.items()}
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


def _gathered(own: Tensor, ranks: GroupCoordinator) -> list[Tensor]:
    """Return every rank's bytes on the first rank, and an empty list on others."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.world_size)]
    torch.distributed.all_gather(sizes, torch.tensor([len(own)]), ranks.cpu_group)
    room = own.new_zeros(max(map(int, sizes)))
    room[: len(own)] = own
    parts = [torch.empty_like(room) for _ in sizes] if ranks.is_first_rank else []
    torch.distributed.gather(room, parts or None, ranks.first_rank, ranks.cpu_group)
    return [part[: int(size)] for part, size in zip(parts, sizes, strict=False)]
