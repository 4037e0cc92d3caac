"""A grid swept into its file, with progress: what `keepset eval` and `keepset reproduce` share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Exit

from keepset.errors import KeepsetError, installation
from keepset.lab.cli.checks import check_measured
from keepset.lab.cli.console import counted, load, note, progress, status
from keepset.lab.embedded import Source
from keepset.models import context_length

if TYPE_CHECKING:
    from keepset.lab.record import Record
    from keepset.lab.sweep.engine import Skipped
    from keepset.lab.sweep.prompts import Asking
    from keepset.lab.sweep.sweep import Cost, SweepGrid
    from keepset.lab.tasks.task import Task

_CHAT = "chat template"

Foretell = Callable[["Cost"], None]
"""Called with what all cells take, before the first of them is made."""

Swept = tuple[Sequence["Record"], Sequence["Skipped"]]
"""The cells that were asked for, in the order of tasks and candidates, and those that could not be made."""


def check_ray(ray: bool) -> None:
    """Refuse Ray where it is not installed."""
    if ray and find_spec("ray") is None:
        raise KeepsetError(
            f"Ray is not installed: run {installation('ray')}, or leave --ray out to use this machine alone."
        )


def sweep_grid(
    out: Path, grid: SweepGrid, source: Source, asking: Asking, ray: bool, foretell: Foretell, *, complete: bool = True
) -> Swept:
    """Make the cells that a file lacks. The model is not loaded if it lacks none.

    Ctrl-C ends the command with a note of how far it has come.

    Args:
        out: the sweep's file, begun or not.
        grid: the cells that are asked for.
        source: the model.
        asking: how candidates are asked.
        ray: whether the workers of a Ray cluster make the cells.
        foretell: called before the first cell is made.
        complete: whether a recipe is refused whose statistics or tables cannot be read; else its cells say so.

    Raises:
        KeepsetError: the file cannot be used, another process adds to it, or a task does not fit the model.
    """
    if grid.answer_tokens is not None:
        for task in grid.tasks:
            task.generation = replace(task.generation, tokens=grid.answer_tokens)
    settings: dict[str, Any] = {
        "--limit": grid.limit,
        "--sample": grid.sample,
        "--mode": asking.mode,
        "--temperature": asking.temperature,
        "--output-tokens": grid.answer_tokens,
        **({"answers one by one": True} if asking.alone else {}),
    }
    if (finished := _finished(out, grid, source, asking.chat, settings)) is not None:
        return finished
    from keepset.contexts.fingerprint import fingerprint
    from keepset.lab.sweep import sweep
    from keepset.lab.sweep.engine import Engine
    from keepset.lab.sweep.store import Store

    # With Ray it is the workers' GPUs that compute.
    loaded, tokenizer = load(source._replace(device="cpu") if ray else source)
    _check_lengths(grid.tasks, context_length(loaded))
    if complete:
        check_measured(loaded, (candidate.recipe for group in grid.candidates.values() for candidate in group))
    asking = replace(asking, chat=asking.chat and tokenizer.chat_template is not None)
    configuration = {**settings, _CHAT: asking.chat, **fingerprint(loaded)}
    with Store.begin(out, source.called, configuration) as store:
        with status("making examples"):
            portions = grid.portions(store, tokenizer)
        foretell(sweep.cost(portions, tokenizer, asking))
        left, total = sweep.unfinished(portions, store.done()), sweep.count(portions)
        try:
            with progress() as bar:
                advance = counted(bar, "cells", total, total - sweep.count(left))
                if ray:
                    from keepset.lab.sweep import ray_sweep

                    nbytes = 2 * sum(parameter.nbytes for parameter in loaded.parameters())
                    make = ray_sweep.EngineSource(source, asking)
                    lost = ray_sweep.run(store, left, make, nbytes, advance)
                else:
                    lost = sweep.run(store, left, Engine(loaded, tokenizer, asking), advance)
        except KeyboardInterrupt:
            done = total - sweep.count(sweep.unfinished(portions, store.done()))
            many = f"{done} of {total} cells, which are in {str(out)!r}: the same command goes on"
            note(f"stopped after {many}" if done else f"stopped before one of {total} cells was made")
            raise Exit(130) from None
        return grid.of(store.cells()), lost


def _check_lengths(tasks: Iterable[Task], longest: int | None) -> None:
    for task in tasks:
        if longest is not None and getattr(task, "length", 0) > longest:
            raise KeepsetError(
                f"{task.name} does not fit the model's context of {longest} tokens: ask for fewer --prompt-tokens."
            )


def _finished(out: Path, grid: SweepGrid, source: Source, chat: bool, settings: dict[str, Any]) -> Swept | None:
    """Return the cells if the file has all of them; else refuse a file that cannot be gone on with.

    Args:
        out: the sweep's file.
        grid: the cells that are asked for.
        source: the model.
        chat: whether prompts are chats.
        settings: the settings that the file must have.
    """
    from keepset.lab.sweep.store import Store, check_free

    if not out.exists() or not out.stat().st_size:
        return None
    with Store.open(out) as store:
        store.check(settings)
        same = store.model == source.called and store.configuration[_CHAT] is chat
        same = same and source.dtype in (None, store.configuration["precision"])
        if same and grid.is_done(store):
            return grid.of(store.cells()), ()
    check_free(out)
    return None


def say_lost(lost: Sequence[Skipped]) -> None:
    """Note which cells could not be made this time, and why."""
    for cell, times in Counter(lost).items():
        note(f"{cell.task}: {cell.recipe} was left out, {times} times ({cell.reason}); the same command tries again")
