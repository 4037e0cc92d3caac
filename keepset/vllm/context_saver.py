"""`ContextSaver`: writes what requests leave in the pool to files, beside a process's steps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm.logger import init_logger

from keepset.hf import saved
from keepset.recipe import Recipe, Schedule
from keepset.vllm.engine_context import EngineContext

logger = init_logger(__name__)


def at_rest(recipe: str | None) -> str:
    """What a file says of entries that a recipe has kept, all of which are its prompt now; None has kept all."""
    if recipe is None:
        return "streaming_llm(keep=1.0)"
    parsed = Recipe.parse(recipe)
    schedule = Schedule(every=parsed.schedule.every)
    return str(replace(parsed, budget=replace(parsed.budget, protect_prompt=False), schedule=schedule))


@dataclass(frozen=True)
class SaveJob:
    """A request that has ended and whose blocks wait to be saved.

    Attributes:
        request: its name.
        path: of the file.
        recipe: that it was compressed by.
        model: its name.
        fingerprint: of it.
        tokens: that the request has had.
        blocks: of the request, by logical position.
    """

    request: str
    path: Path
    recipe: str
    model: str
    fingerprint: dict[str, str] = field(repr=False)
    tokens: list[int] = field(repr=False)
    blocks: list[int]


class ContextSaver:
    """Of the process that has all heads; `context` has its layers."""

    def __init__(self, context: EngineContext) -> None:
        (self._group,) = context.groups
        self._events = context.events
        self._writer = ThreadPoolExecutor(1, "keepset-saves")
        self._writing: list[tuple[str, Future[None]]] = []

    def start(self, jobs: Sequence[SaveJob], idle: bool) -> None:
        """Copies what these requests have left; `idle`: there is nothing else to do than to write it."""
        if jobs:
            self._events.run()
        for job in jobs:
            try:
                layers = self._group.left(job.blocks, len(job.tokens))
            except RuntimeError as error:
                logger.error("Request %s: not saved: %s", job.request, error)
                continue
            self._writing.append((job.request, self._writer.submit(self._write, job, layers)))
        if idle:
            wait([written for _, written in self._writing])

    def finish(self) -> set[str]:
        """Requests whose blocks are needed no more since it was asked last."""
        done = {name for name, written in self._writing if written.done()}
        for name, written in self._writing:
            if written.done() and (error := written.exception()) is not None:
                logger.error("Request %s: not saved: %s", name, error)
        self._writing = [(name, written) for name, written in self._writing if name not in done]
        return done

    @staticmethod
    def _write(job: SaveJob, layers: dict[int, saved.Columns]) -> None:
        job.path.parent.mkdir(parents=True, exist_ok=True)
        saved.save_entries(job.path, job.recipe, job.model, job.fingerprint, job.tokens, layers)
