"""Printing of commands: results on standard output, progress and notes on standard error."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepset import models
from keepset.bench.report import page
from keepset.cli.grid import Grid
from keepset.cli.options import STANDARD_OUTPUT
from keepset.defaults import NETWORKS

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID
    from rich.text import Text
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from keepset.bench.report.table import Table
    from keepset.recipe import Recipe


_LONG = 20
"""Least seconds of remaining work that are worth a note."""
_TRIED = 3
"""Steps by which the time of the others is estimated."""
_SILENT = 30
"""Seconds between two notes on progress if there is no terminal."""


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
    """Print a result as it is."""
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
    text = sanitize(text)
    if console.is_terminal:
        fill = partial(textwrap.fill, width=console.width, break_long_words=False, break_on_hyphens=False)
        lines = ((line, " " * (len(line) - len(line.lstrip()))) for line in text.split("\n"))
        text = "\n".join(fill(line, subsequent_indent=indent) for line, indent in lines)
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def output(result: Any, json_file: Path | None, print_tables: Callable[[], None]) -> None:
    """Print a result as tables and write it as JSON, or print only the JSON if the file is `-`."""
    # JSON has no word for NaN or infinity.
    text = json.dumps(_plain(result), indent=2, allow_nan=False) if json_file is not None else ""
    if json_file == STANDARD_OUTPUT:
        print(text)
        return
    print_tables()
    write(json_file, lambda: f"{text}\n", "figures")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(path: Path | None, content: Callable[[], str], described: str | None = "report") -> None:
    """Write a file that was asked for, whole or not at all, and note it unless `described` is None."""
    if path is None:
        return
    page.write(path, content())
    if described is not None:
        note(f"{described}: {path}")


def table(*texts: str, numbers: Sequence[str] = (), optional: Sequence[str] = (), fold: bool = False) -> Grid:
    """Return an empty table with these columns; see `Grid`."""
    return Grid(texts, numbers, optional, fold)


def show_table(table: Table) -> None:
    """Print a table's lines under their headings, then in red the lines that have an error and no figures."""
    columns = [(at, column) for at, column in enumerate(table.columns) if not column.page_only]
    grid = Grid([table.head], [column.title for _, column in columns], fold=table.fold)
    for (_, column), printed in zip(columns, grid.columns[1:], strict=True):
        printed.rank = column.rank
    heading = ""
    for line in table.lines:
        if not line.cells:
            continue
        if line.heading != heading:
            heading = line.heading
            grid.add_row(cell(heading, style="bold"))
        inside = "  " if heading else ""
        why = "\n".join(f"  {inside}{part}" for part in line.error.split("\n")) if line.error else None
        name = cell(inside + (line.short or line.name), why)
        grid.add_row(name, *(sanitize(line.cells[at][0]) for at, _ in columns), style=line.style)
    show(grid)
    for line in table.lines:
        if not line.cells:
            say(f"{line.name}: {line.error}", style="red")


def say_advice(recipes: Iterable[Recipe]) -> None:
    """Note what to write instead of recipes whose bare defaults are known to do badly."""
    for recipe in recipes:
        if recipe.advice:
            note(recipe.advice)


def say_networks(default: str, called: str) -> None:
    """Note how networks are made for a model whose default recipe does without them."""
    if default != NETWORKS:
        note(
            f"There are no networks for {called}, with which {NETWORKS} would be the default: `keepset calibrate "
            f"--model {called} --teacher reread --out stats.safetensors` makes them, and "
            "distilled(stats='stats.safetensors') names them."
        )


def say_whole(recipe: Recipe, length: int) -> None:
    """Note that a prompt is too short for the recipe to drop anything of it."""
    budget = recipe.budget
    if budget.sinks + budget.recent >= length and budget.keep != 1.0:
        always = " and ".join(
            f"the {which} {count}" for which, count in (("first", budget.sinks), ("newest", budget.recent)) if count
        )
        note(f"The prompt stays whole: it has {length} tokens, and {recipe} always keeps {always}.")


def cell(text: str, error: str | None = None, style: str = "") -> Text:
    """Return a cell with a text of a model or a user, and below it an error."""
    from rich.text import Text

    content = Text(sanitize(text), style)
    return content if error is None else content.append(f"\n{sanitize(error)}", "red")


def progress() -> Progress:
    """Return a progress bar with the time left; without a terminal `counted` prints a note now and then."""
    from rich import progress as rich

    columns = rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn()
    times = rich.TimeElapsedColumn(), rich.TextColumn("left"), rich.TimeRemainingColumn()
    console = stderr()
    return rich.Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal)


def status(text: str) -> AbstractContextManager[Any]:
    """Show on a terminal what is under way."""
    return stderr().status(text)


def counted(bar: Progress, description: str, total: int, completed: int = 0) -> Callable[..., None]:
    """Add a line to the progress bar, and return a function that advances it by a count, which is 1 by default."""
    return moved(bar, bar.add_task(description, total=total, completed=completed))


def moved(bar: Progress, number: TaskID) -> Callable[..., None]:
    """Return a function that advances this line of the progress bar, and notes it without a terminal."""
    task = bar.tasks[number]
    before, began = task.completed, time.monotonic()
    said = began

    def step(count: int = 1) -> None:
        nonlocal said
        bar.advance(number, count)
        now, total = time.monotonic(), task.total or 0
        if bar.disable and now - said >= _SILENT and before < task.completed < total:
            said, left = now, (now - began) / (task.completed - before) * (total - task.completed)
            note(f"{task.description}: {task.completed:.0f} of {total:.0f}, {duration(left)} left")

    return step


def foretold(advance: Callable[..., None], what: str, total: int, after: int = 1) -> Callable[..., None]:
    """Return `advance` with a note on how long the rest will take; steps up to `after` include what is done once."""
    began, first, done, said = 0.0, 0, 0, False

    def step(count: int = 1) -> None:
        nonlocal began, first, done, said
        advance(count)
        done, now = done + count, time.perf_counter()
        if not first and done >= after:
            # From here on every step is typical.
            began, first = now, done
        elif first and not said and (done - first >= _TRIED or now - began >= _LONG):
            said, left = True, (now - began) / (done - first) * (total - done)
            if left >= _LONG:
                note(f"{what}: {duration(left)} from here on")

    return step


class TimeUp(Exception):  # noqa: N818  # as KeyboardInterrupt is no error
    """Raised when the minutes of a command are over."""


def bounded(advance: Callable[..., None], minutes: float | None) -> Callable[..., None]:
    """Return `advance`, which raises `TimeUp` once the minutes are over; None for no limit."""
    end = None if minutes is None else time.monotonic() + 60 * minutes

    def step(count: int = 1) -> None:
        advance(count)
        if end is not None and time.monotonic() > end:
            raise TimeUp

    return step


def duration(seconds: float) -> str:
    """Return a rough duration for a person."""
    if seconds < 90:
        return f"about {seconds:.0f} seconds"
    return f"about {seconds / 60:.0f} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"


def load(source: models.Source) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model and its tokenizer, see `models.load`; progress is shown on a terminal only."""
    with status("loading the model"), nullcontext() if stderr().is_terminal else models.no_progress_bars():
        return models.load(*source)


def sanitize(text: str) -> str:
    """Return a text of a model or a user without characters that control a terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in text)


def megabytes(nbytes: int) -> str:
    """Return bytes as megabytes for a person."""
    return f"{nbytes / 1e6:.1f} MB"
