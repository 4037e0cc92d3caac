"""What commands print with: results on standard output, progress on standard error."""

from __future__ import annotations

import unicodedata

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

out = Console()
err = Console(stderr=True)


def progress() -> Progress:
    """A progress bar with the time left; shown on a terminal, silent elsewhere."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


def printable(text: str) -> str:
    """Text of a model or a user without characters that steer a terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in text)


def megabytes(nbytes: int) -> str:
    """Bytes for a person."""
    return f"{nbytes / 1e6:.1f} MB"
