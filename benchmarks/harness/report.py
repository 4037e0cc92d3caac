"""Results as a table in the terminal and as files: JSON with every figure, Markdown to read and quote."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent.parent / "results"
WIDTH = 120  # for outputs without a width: a file, a pipe
VERDICT_STYLE = {"met": "green", "not met": "red"}


@dataclass
class Section:
    """One table."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def publish(name: str, sections: Sequence[Section], data: dict[str, Any]) -> None:
    """Print the tables and write `results/<name>.json` and `results/<name>.md`."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for section in sections:
        console.print(_rich(section))
        for note in section.notes:
            console.print(note, style="dim")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    (RESULTS / f"{name}.md").write_text("\n".join(_markdown(section) for section in sections))
    console.print(f"written: {RESULTS.parent.name}/results/{name}.json and {name}.md")


def machine() -> dict[str, Any]:
    """Return the facts of the machine and versions that explain the figures."""
    return {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _rich(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(section.columns):
        first = number == 0
        table.add_column(column, justify="left" if first else "right", no_wrap=first, overflow="fold")
    for row in section.rows:
        table.add_row(*(f"[{VERDICT_STYLE[cell]}]{cell}[/]" if cell in VERDICT_STYLE else cell for cell in row))
    return table


def _markdown(section: Section) -> str:
    alignment = [":--"] + ["--:"] * (len(section.columns) - 1)
    lines = [section.columns, alignment, *section.rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {section.title}\n\n{table}\n\n" + "".join(f"{note}\n\n" for note in section.notes)
