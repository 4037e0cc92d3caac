"""What commands print with: results on standard output, progress on standard error."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from keepset.errors import KeepsetError

if TYPE_CHECKING:
    import transformers

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


def load(name: str | None) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """The model of that name; how far it has come is shown on a terminal only."""
    from transformers.utils import logging

    from keepset import models

    silenced = not err.is_terminal and logging.is_progress_bar_enabled()
    if silenced:
        logging.disable_progress_bar()
    try:
        with err.status("loading the model"):
            return models.load(name)
    finally:
        if silenced:
            logging.enable_progress_bar()


def check_said(name: str, text: str) -> None:
    """Refuses what a user typed where there is nothing to read in it.

    Raises:
        KeepsetError: it is blank, or holds bytes that are no UTF-8.
    """
    if not text.strip():
        raise KeepsetError(f"{name} is empty: write some text.")
    if any(unicodedata.category(c) == "Cs" for c in text):
        raise KeepsetError(f"{name} is not UTF-8: write it as UTF-8 text.")


def check_out(out: Path, force: bool) -> None:
    """Refuses a file of tensors that could not be written, or should not be.

    Raises:
        KeepsetError: its folder is missing or a model's, or it is there already and is not to be replaced.
    """
    if out.is_dir() or not out.parent.is_dir():
        raise KeepsetError(f"--out {str(out)!r} is no place for a file: name a file in a folder that exists.")
    if (out.parent / "config.json").exists():
        raise KeepsetError(
            f"--out {str(out)!r} is in a model's folder, where every .safetensors is taken for weights: name another."
        )
    if out.exists() and not force:
        raise KeepsetError(f"{str(out)!r} exists: name another file with --out, or replace it with --force.")


def printable(text: str) -> str:
    """Text of a model or a user without characters that steer a terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in text)


def megabytes(nbytes: int) -> str:
    """Bytes for a person."""
    return f"{nbytes / 1e6:.1f} MB"
