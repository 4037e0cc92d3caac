"""What commands print with: results on standard output, progress and notes on standard error."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepset import models
from keepset.bench.report import page

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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


def output(result: Any, as_json: bool, print_tables: Callable[[], None]) -> None:
    """Prints a result for programs, or for a person."""
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_tables()


def write(path: Path | None, content: Callable[[], str], described: str | None = "report") -> None:
    """Writes a file that was asked for, whole or not at all, and says so."""
    if path is None:
        return
    page.write(path, content())
    if described is not None:
        note(f"{described}: {path}")


def table(*texts: str, numbers: Iterable[str] = (), fold: bool = False) -> Table:
    """A table with these columns: texts may go on in a next line, numbers only with `fold`."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for title in texts:
        grid.add_column(title, overflow="fold")
    for title in numbers:
        grid.add_column(title, justify="right", no_wrap=not fold, overflow="fold" if fold else "ellipsis")
    return grid


def cell(text: str, error: str | None = None, style: str = "") -> Text:
    """Text of a model or a user in a table, and below it what went wrong."""
    from rich.text import Text

    content = Text(sanitize(text), style)
    return content if error is None else content.append(f"\n{sanitize(error)}", "red")


def progress() -> Progress:
    """A progress bar with the time left; shown on a terminal, silent elsewhere."""
    from rich import progress as rich

    columns = rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn()
    times = rich.TimeElapsedColumn(), rich.TextColumn("left"), rich.TimeRemainingColumn()
    console = stderr()
    return rich.Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal)


def status(text: str) -> AbstractContextManager[Any]:
    """Shows on a terminal what is under way."""
    return stderr().status(text)


def counted(bar: Progress, description: str, total: int, completed: int = 0) -> Callable[..., None]:
    """A line of the progress bar; what is returned moves it on, by one unless it is told otherwise."""
    return partial(bar.advance, bar.add_task(description, total=total, completed=completed))


def load(source: models.Source) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """That model, see `models.load`; how far it has come is shown on a terminal only."""
    with status("loading the model"), nullcontext() if stderr().is_terminal else models.no_progress_bars():
        return models.load(*source)


def sanitize(text: str) -> str:
    """Text of a model or a user without characters that steer a terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in text)


def megabytes(nbytes: int) -> str:
    """Bytes for a person."""
    return f"{nbytes / 1e6:.1f} MB"
