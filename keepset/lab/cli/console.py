"""Printing of commands: results on standard output, progress and notes on standard error."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Exit

from keepset import models
from keepset.lab import embedded
from keepset.lab.cli.grid import Grid, sanitize
from keepset.lab.cli.options import STANDARD_OUTPUT
from keepset.lab.report import page

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from keepset.lab.report.table import Table


_SILENT = 30
"""Seconds without output after which a note says what is under way, if there is no terminal."""


_heard = [-math.inf]
"""When something was printed last, by `time.monotonic`."""
_beating: list[threading.Event] = []
"""The blocks of `beating` that have begun, the outermost first."""


_STARTING = "loading..."


def say_starting() -> None:
    """Say on a terminal that something is under way: torch takes seconds to import. Later output replaces it."""
    if sys.stderr.isatty():
        print(_STARTING, end="\r", file=sys.stderr, flush=True)


@cache
def unsay_starting() -> None:
    """Blank what `say_starting` wrote, once, before anything else is printed."""
    if sys.stderr.isatty():
        print(" " * len(_STARTING), end="\r", file=sys.stderr, flush=True)


@cache
def stdout() -> Console:
    """Return the console of results; it is made on first use, because loading rich would slow down every start."""
    from rich.console import Console

    unsay_starting()
    return Console()


@cache
def stderr() -> Console:
    """Return the console of progress and notes."""
    from rich.console import Console

    unsay_starting()
    return Console(stderr=True)


def say(text: str, *, style: str | None = None) -> None:
    """Print a result as it is.

    Args:
        text: the result.
        style: a style of rich.
    """
    _print(stdout(), text, style)


def explain(text: str) -> None:
    """Print what words in a table mean, on a terminal only."""
    if stdout().is_terminal:
        say(text, style="dim")


def show(*rendered: RenderableType) -> None:
    """Print tables and texts with styles of their own, or an empty line."""
    stdout().print(*rendered)


def note(text: str) -> None:
    """Print a note on standard error."""
    _print(stderr(), text)


def _print(console: Console, text: str, style: str | None = None) -> None:
    """Print a text; on a terminal lines break between words only, and for programs they do not break."""
    _heard[0] = time.monotonic()
    text = sanitize(text)
    if console.is_terminal:
        fill = partial(textwrap.fill, width=console.width, break_long_words=False, break_on_hyphens=False)
        lines = ((line, " " * (len(line) - len(line.lstrip()))) for line in text.split("\n"))
        text = "\n".join(fill(line, subsequent_indent=indent) for line, indent in lines)
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def output(result: Any, json_file: Path | None, print_tables: Callable[[], None]) -> None:
    """Print a result as tables and write it as JSON, or print only the JSON if the file is `-`.

    Args:
        result: what JSON shows.
        json_file: the file of --json.
        print_tables: prints the tables.
    """
    if json_file is None:
        print_tables()
        return
    text = json.dumps(page.finite(result, lambda number: None), indent=2, allow_nan=False)
    if json_file == STANDARD_OUTPUT:
        print(text)
        return
    print_tables()
    write(json_file, lambda: f"{text}\n", "figures")


def write(path: Path | None, content: Callable[[], str], described: str | None = "report") -> None:
    """Write a file that was asked for, whole or not at all, and note it.

    Args:
        path: the file; None if none was asked for.
        content: returns the file's text.
        described: what the note calls it; None for no note.
    """
    if path is None:
        return
    page.write(path, content())
    if described is not None:
        note(f"{described}: {path}")


def show_table(table: Table) -> None:
    """Print a table, then in red the lines that have an error and no figures."""
    show(Grid(table))
    for line in table.lines:
        if not line.cells:
            say(f"{line.name}: {line.error}", style="red")


@contextmanager
def progress(description: str = "at work") -> Iterator[Progress]:
    """Show a progress bar with the time left; without a terminal note every half minute how far it has come.

    The description says what is under way while the bar has no line of its own.
    """
    from rich import progress as rich
    from rich.text import Text

    class Left(rich.ProgressColumn):
        def render(self, task: Any) -> Any:
            left = _left(task)
            return Text("" if left is None or task.finished else f"{duration(left)} left")

    console = stderr()
    bar = rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        Left(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar, beating(lambda: how_far(bar) or description):
        yield bar


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show on a terminal what is under way; without one note it every half minute."""
    with stderr().status(text), beating(lambda: text):
        yield


@contextmanager
def beating(state: Callable[[], str]) -> Iterator[None]:
    """Note what is under way, within the block and without a terminal, whenever nothing was printed for half a minute.

    `state` returns what it is; "" for nothing worth a note.
    """
    if stderr().is_terminal or not math.isfinite(_SILENT):
        yield
        return
    ended, began = threading.Event(), time.monotonic()

    def beat() -> None:
        while not ended.wait(min(1.0, _SILENT)):
            now = time.monotonic()
            # Of blocks inside one another the innermost knows best what is under way.
            if _beating[-1:] == [ended] and now - max(_heard[0], began) >= _SILENT and (text := state()):
                note(f"{text} (after {now - began:.0f} s)")

    thread = threading.Thread(target=beat, daemon=True)
    _beating.append(ended)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        _beating.remove(ended)
        thread.join()


def how_far(bar: Progress) -> str:
    """Return what the newest unfinished line of a bar says: its name, steps, and the time left if that is known."""
    task = next((task for task in reversed(bar.tasks) if task.completed < (task.total or 0)), None)
    if task is None:
        return ""
    left = _left(task)
    time_left = "" if left is None else f", {duration(left)} left"
    return f"{task.description}: {task.completed:.0f} of {task.total:.0f}{time_left}"


def _left(task: Any) -> float | None:
    """Return the seconds that a line of a bar still takes, by the mean of its steps; None if that says nothing yet.

    Rich itself goes by the newest steps, and cells of an example come together after its prefill.
    """
    done = task.completed - task.fields.get("before", 0)
    if not task.fields.get("foretells", True):
        return None
    return task.elapsed / done * (task.total - task.completed) if done else None


def counted(
    bar: Progress, description: str, total: int, completed: int = 0, *, foretells: bool = True
) -> Callable[..., None]:
    """Add a line to a progress bar, and return a function that advances it by a count, which is 1 by default.

    Args:
        bar: the progress bar.
        description: the words of the line.
        total: the count at which it is complete.
        completed: the count at which it begins.
        foretells: whether its steps tell how much time is left: they are alike, and nothing comes after them.
    """
    number = bar.add_task(description, total=total, completed=completed, before=completed, foretells=foretells)
    return lambda count=1: bar.advance(number, count)


@dataclass
class Ending:
    """How a block of `interruptible` has ended."""

    finished: bool = False

    def say(self, where: str) -> None:
        """Note where Ctrl-C has ended the block, if it has, and end the command."""
        if not self.finished:
            note(f"interrupted {where}")
            raise Exit(130)


@contextmanager
def interruptible() -> Iterator[Ending]:
    """End the block quietly at Ctrl-C; what it yields says whether that has happened."""
    ending = Ending()
    with suppress(KeyboardInterrupt):
        yield ending
        ending.finished = True


def duration(seconds: float) -> str:
    """Return a rough duration for a person."""
    if seconds < 90:
        whole = max(1, round(seconds))
        return f"about {whole} second{'s' * (whole > 1)}"
    return f"about {seconds / 60:.0f} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"


def load(source: embedded.Source) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model and its tokenizer, see `models.load`; transformers shows progress on a terminal only."""
    with status("loading the model"), nullcontext() if stderr().is_terminal else embedded.no_progress_bars():
        loaded = models.load(*source)
    if source.name is None and (name := loaded[0].config.name_or_path) == str(embedded.embedded_folder()):
        from keepset.core.statistics import offer

        offer(name, _measured)
    return loaded


def _measured() -> Path:
    """Return the file of the embedded model's statistics; say so if they are measured first, and how long it takes."""
    path = embedded.statistics_path()
    if path.is_file():
        return path
    activity = "measuring the embedded model's statistics"
    began = time.monotonic()
    with beating(lambda: activity):
        embedded.embedded_statistics()  # which announces it
    note(f"{activity} took {duration(time.monotonic() - began).removeprefix('about ')}")
    return path


def megabytes(nbytes: int) -> str:
    """Return bytes as megabytes for a person."""
    return f"{nbytes / 1e6:.1f} MB"
