"""Checks that several commands make before they begin; each raises `KeepsetError`."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepset.cli.options import STANDARD_OUTPUT
from keepset.core.files import check_replaceable
from keepset.errors import KeepsetError
from keepset.models import context_length

if TYPE_CHECKING:
    from keepset.recipe import Recipe


def check_text(name: str, text: str | None) -> None:
    """Refuse a text of the user that is blank or not UTF-8.

    Args:
        name: what the sentence calls the text.
        text: the text; None if none was given.
    """
    if text is None:
        return
    if not text.strip():
        raise KeepsetError(f"{name} is empty: write some text.")
    if any(unicodedata.category(c) == "Cs" for c in text):
        raise KeepsetError(f"{name} is not UTF-8: write it as UTF-8 text.")


def check_whole(limit: int, **options: tuple[int, int]) -> None:
    """Refuse options that are out of range.

    Args:
        limit: all values have to be below it.
        options: value and least value of each option, by its name.
    """
    for name, (value, least) in options.items():
        if not least <= value < limit:
            raise KeepsetError(
                f"--{name.replace('_', '-')} {value} is out of range: use a whole number from {least} to {limit - 1}."
            )


def check_minutes(minutes: float | None) -> None:
    """Refuse a number of minutes that is not above 0."""
    if minutes is not None and not 0 < minutes < 1e6:
        raise KeepsetError(f"--minutes {minutes} is out of range: use a number above 0.")


def check_writable(*paths: Path | None) -> None:
    """Refuse output files that could not be written.

    Raises:
        KeepsetError: the folder of one does not exist, or what is there is no regular file.
    """
    for path in paths:
        if path is None or path == STANDARD_OUTPUT:
            continue
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise KeepsetError(f"{str(path)!r} cannot be written: give a file in a folder that exists.")
        check_replaceable(path)


def check_tensor_file(out: Path, force: bool) -> None:
    """Refuse a file of tensors that cannot be written, or should not be.

    Args:
        out: the file.
        force: whether it may replace another.
    """
    if out.is_dir() or not out.parent.is_dir():
        raise KeepsetError(f"--out {str(out)!r} is no place for a file: name a file in a folder that exists.")
    if (out.parent / "config.json").exists():
        raise KeepsetError(
            f"--out {str(out)!r} is in a model's folder, where every .safetensors is taken for weights: name another."
        )
    check_replaceable(out)
    if out.exists() and not force:
        raise KeepsetError(f"{str(out)!r} exists: name another file with --out, or replace it with --force.")


def check_measured(model: Any, recipes: Iterable[Recipe | None]) -> None:
    """Refuse recipes whose statistics or tables cannot be read, or are another model's.

    Args:
        model: the model.
        recipes: the recipes; None stands for the full cache.
    """
    from keepset.core.features.runtime_features import ModelStatistics, ModelTables
    from keepset.hf.cache import Cache

    for recipe in recipes:
        if recipe is not None and any(
            isinstance(need, ModelStatistics | ModelTables) for need in recipe.method.traits.needs
        ):
            Cache(model, recipe).stop_watching()


def check_fits_context(model: Any, length: int, new: int = 0) -> None:
    """Refuse more tokens than the model's context takes.

    Args:
        model: the model.
        length: tokens of the prompt.
        new: tokens to generate.
    """
    longest = context_length(model)
    if longest is not None and length + new > longest:
        more, advice = (f" and {new} new ones", " or ask for fewer tokens") if new else ("", "")
        raise KeepsetError(
            f"{length} tokens of prompt{more} do not fit the model's context of {longest}: give a shorter text{advice}."
        )
