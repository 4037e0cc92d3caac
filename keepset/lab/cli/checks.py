"""Checks and parsers of options that several commands share, which raise `KeepsetError`; and notes on recipes."""

from __future__ import annotations

import ast
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from keepset.errors import BudgetError, KeepsetError, UnsupportedModelError
from keepset.lab.cli.console import note
from keepset.lab.cli.options import STANDARD_OUTPUT
from keepset.models import context_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from keepset.core.budget import Budget
    from keepset.recipe import Recipe

Text = TypeVar("Text", str, str | None)

_FEW = 64
"""Entries per head below which a budget is noted, because it may be meant as a percentage."""


def given_text(name: str, text: Text) -> Text:
    """Return a text of the user, or standard input for `-`; None stays None.

    Args:
        name: the text's name in errors.
        text: what the user has written.

    Raises:
        KeepsetError: it is blank or not UTF-8.
    """
    if text is None:
        return text
    if text == "-":
        from keepset.lab.texts import read_standard_input

        return read_standard_input(name).strip()
    if not text.strip():
        raise KeepsetError(f"{name} is empty: write some text.")
    if any(unicodedata.category(c) == "Cs" for c in text):
        raise KeepsetError(f"{name} is not UTF-8: write it as UTF-8 text.")
    return text


def check_whole(limit: int, **options: tuple[int, int]) -> None:
    """Refuse options whose value is below its least value, or not below the limit; each is (value, least value)."""
    for name, (value, least) in options.items():
        if not least <= value < limit:
            raise KeepsetError(
                f"--{name.replace('_', '-')} {value} is out of range: use a whole number from {least} to {limit - 1}."
            )


def check_least(least: int, **options: int | None) -> None:
    """Refuse options that are given and below their least value."""
    for name, value in options.items():
        if value is not None and value < least:
            raise KeepsetError(f"--{name.replace('_', '-')} {value} is out of range: use an integer from {least}.")


def check_writable(*paths: Path | None) -> None:
    """Refuse output files that could not be written.

    Raises:
        KeepsetError: the folder of one does not exist, or what is there is no regular file.
    """
    from keepset.core.files import check_replaceable  # which imports torch

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
        force: whether it may be replaced.
    """
    from keepset.core.files import check_replaceable

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
    """Refuse recipes whose statistics or tables cannot be read, or are another model's; None is the full cache.

    A recipe that the model cannot run is left to the measurement, which says so in its row.

    Args:
        model: the model.
        recipes: the recipes; None is the full cache.
    """
    from keepset.core.features.runtime_features import ModelStatistics, ModelTables
    from keepset.hf.cache import Cache

    for recipe in recipes:
        if recipe is not None and any(
            isinstance(need, ModelStatistics | ModelTables) for need in recipe.method.traits.needs
        ):
            with suppress(UnsupportedModelError):
                Cache(model, recipe).stop_watching()


def default_recipe(model: Any, called: str, otherwise: str) -> Recipe:
    """Return the default recipe (see `defaults`), and note which it is and why.

    Args:
        model: the model.
        called: the model's name in the note.
        otherwise: the recipe of a model without networks.

    Raises:
        KeepsetError: the model's statistics cannot be read.
    """
    from keepset import defaults

    recipe, why = defaults.default_recipe(model.config.name_or_path or "", called, otherwise)
    note(why)
    return recipe


def note_short(length: int, kept: float) -> None:
    """Note that a prompt is short, if a recipe kept only a share of its entries.

    Args:
        length: tokens of the prompt.
        kept: the share of the entries that stayed.
    """
    from keepset.defaults import SHORT

    if kept < 1 and length < SHORT:
        note(f"A prompt of {length} tokens is short (minimum {SHORT}): the entries that were dropped will be missed.")


def offered_recipes(model: Any) -> list[Recipe]:
    """Return the recipes to choose from, without budgets: every default for a model, then `defaults.COMPARED`.

    Raises:
        KeepsetError: the model's statistics cannot be read.
    """
    from keepset import defaults
    from keepset.recipe import Recipe

    model_defaults = defaults.default_methods(model.config.name_or_path or "")
    return list(dict.fromkeys([*model_defaults, *Recipe.parse_list(", ".join(defaults.COMPARED))]))


def check_fits_context(model: Any, length: int, new: int = 0) -> None:
    """Refuse more tokens than the model's context takes.

    Args:
        model: the model.
        length: tokens of the prompt.
        new: tokens to generate.
    """
    longest = context_length(model)
    if longest is not None and length + new > longest:
        suffix, advice = (f" and {new} new ones", " or ask for fewer tokens") if new else ("", "")
        raise KeepsetError(
            f"{length} tokens of prompt{suffix} do not fit the model's context of {longest}: give a shorter "
            f"text{advice}."
        )


def check_length(model: Any, option: str, length: int) -> None:
    """Refuse an option of more tokens than the model's context takes.

    Args:
        model: the model.
        option: the option's name.
        length: the option's value, in tokens.
    """
    longest = context_length(model)
    if longest is not None and length > longest:
        raise KeepsetError(f"{option} {length} is more than the model's context of {longest}: use {longest} or less.")


def parse_budgets(text: str) -> list[Budget]:
    """Return the budgets of a list such as `0.25, 512`: shares of bytes, or entries per head.

    Raises:
        BudgetError: one is no number, or out of range.
    """
    from keepset.core.budget import Budget

    allowed = "use a share of a full 16-bit cache's bytes such as 0.25, or entries per head such as 512"
    budgets: list[Budget] = []
    for part in text.split(","):
        try:
            value = ast.literal_eval(part.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
        if isinstance(value, bool) or not isinstance(value, int | float):
            guess = _guess(part.strip())
            ending = f"; did you mean {guess}? {allowed[0].upper()}{allowed[1:]}." if guess else f": {allowed}."
            raise BudgetError(f"The budget {part.strip()!r} is not a number{ending}")
        if isinstance(value, int) and value.bit_length() > 63:
            raise BudgetError(f"The budget {part.strip()} is too large a number: {allowed}.")
        budgets.append(Budget(value) if isinstance(value, int) else Budget(bytes=value))
    return budgets


def note_few_entries(budgets: Iterable[Budget]) -> None:
    """Say what a small whole number means, since a percentage may be meant."""
    for number in [budget.keep for budget in budgets if isinstance(budget.keep, int) and budget.keep < _FEW]:
        entries = "one entry" if number == 1 else f"{number} entries"
        percent = "did you mean 1.0, all bytes?" if number == 1 else f"{number} % of the bytes are {number / 100:g}."
        note(f"The budget {number} is {entries} of every head; {percent}")


def _guess(text: str) -> str:
    """Return the share that a percentage stands for; "" for another text."""
    number = text.removesuffix("%").strip()
    is_percent = text.endswith("%") and number.isascii() and number.replace(".", "", 1).isdigit()
    return f"{float(number) / 100:g}" if is_percent and 0 < float(number) <= 100 else ""


def parse_whole(text: str, option: str) -> list[int]:
    """Return whole numbers from a list, each once.

    Args:
        text: the numbers, separated by commas.
        option: the option's name, without its dashes.

    Raises:
        KeepsetError: the text is no such list.
    """
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise KeepsetError(f"--{option} {text!r} is no list of whole numbers: write them as 1,2,3.") from None


def say_advice(recipes: Iterable[Recipe]) -> None:
    """Note what to write instead of recipes whose bare defaults are known to do badly."""
    for recipe in recipes:
        if recipe.advice:
            note(recipe.advice)


def say_networks(model: PreTrainedModel, called: str) -> None:
    """Note how networks are made for a model that has none.

    Args:
        model: the model.
        called: the model's name in the note.
    """
    from keepset.defaults import has_networks, lack_of_networks

    if not has_networks(model.config.name_or_path or ""):
        sentence = lack_of_networks(called)
        note(sentence[0].upper() + sentence[1:])


def say_always(recipe: Recipe, model: PreTrainedModel, length: int) -> None:
    """Note that a prompt is short, or that what always stays of it fills or exceeds the budget.

    Args:
        recipe: the recipe.
        model: the model.
        length: tokens of the prompt.
    """
    from keepset.hf.recipe_notes import was_said, what_stays

    if (sentence := what_stays(recipe, model, length)) is not None and not was_said(sentence):
        note(sentence)


def say_of_all_prompts(recipe: Recipe) -> None:
    """Note the same as `say_always` and `note_short`, for a server, whose prompts are not known yet."""
    from keepset.defaults import SHORT
    from keepset.hf.recipe_notes import nothing_chosen

    budget = recipe.budget
    if budget.keep == budget.sinks + budget.recent and not budget.recent_extra:
        note(nothing_chosen(recipe))
    if budget.short:
        note(f"Prompts of fewer than {budget.short} tokens stay whole.")
    elif budget.bytes is not None or (isinstance(budget.keep, float) and budget.keep < 1):
        note(f"Short prompts are compressed too, though they can spare little: short={SHORT} leaves them whole.")
