"""What commands print with: results on standard output, progress and notes on standard error."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import transformers
    from rich.console import Console, RenderableType
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text


@cache
def stdout() -> Console:
    """Where results go; made on first use, because loading rich would slow down every start."""
    from rich.console import Console

    return Console()


@cache
def stderr() -> Console:
    """Where progress and notes go."""
    from rich.console import Console

    return Console(stderr=True)


def say(text: str, *, soft_wrap: bool = False, style: str | None = None) -> None:
    """Prints a result as it is; lines are broken at words unless `soft_wrap` leaves that to the terminal."""
    stdout().print(sanitize(text), style=style, markup=False, highlight=False, soft_wrap=soft_wrap)


def show(*rendered: RenderableType, soft_wrap: bool = False) -> None:
    """Prints tables and texts with styles of their own, or an empty line."""
    stdout().print(*rendered, soft_wrap=soft_wrap)


def note(text: str) -> None:
    """Prints what is no result."""
    stderr().print(sanitize(text), markup=False, highlight=False, soft_wrap=True)


def print_json(result: Any) -> None:
    """Prints a result for programs."""
    print(json.dumps(result, indent=2))


def write(path: Path | None, content: Callable[[], str], described: str | None = "report") -> None:
    """Writes a file that was asked for, whole or not at all, and says so."""
    if path is None:
        return
    from keepset.bench.report.page import write as write_whole

    write_whole(path, content())
    if described is not None:
        note(f"{described}: {path}")


def table(*texts: str, numbers: Iterable[str] = ()) -> Table:
    """A table with these columns: texts may go on in a next line, numbers may not."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for title in texts:
        grid.add_column(title, overflow="fold")
    for title in numbers:
        grid.add_column(title, justify="right", no_wrap=True)
    return grid


def cell(text: str, error: str | None = None, style: str = "") -> Text:
    """Text of a model or a user in a table, and below it what went wrong."""
    from rich.text import Text

    content = Text(sanitize(text), style)
    return content if error is None else content.append(f"\n{sanitize(error)}", "red")


def progress() -> Progress:
    """A progress bar with the time left; shown on a terminal, silent elsewhere."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )  # fmt: skip

    console = stderr()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def status(text: str) -> AbstractContextManager[Any]:
    """Shows on a terminal what is under way."""
    return stderr().status(text)


def counted(bar: Progress, description: str, total: int) -> Callable[..., None]:
    """A line of the progress bar; what is returned moves it on, by one unless it is told otherwise."""
    return partial(bar.advance, bar.add_task(description, total=total))


def load(name: str | None) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """The model of that name; how far it has come is shown on a terminal only."""
    from transformers.utils import logging

    from keepset import models

    silenced = not stderr().is_terminal and logging.is_progress_bar_enabled()
    if silenced:
        logging.disable_progress_bar()
    try:
        with status("loading the model"):
            return models.load(name)
    finally:
        if silenced:
            logging.enable_progress_bar()


def sanitize(text: str) -> str:
    """Text of a model or a user without characters that steer a terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in text)


def megabytes(nbytes: int) -> str:
    """Bytes for a person."""
    return f"{nbytes / 1e6:.1f} MB"
