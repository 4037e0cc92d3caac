"""Parsers of lists of numbers that are separated by commas."""

import ast

from keepset.cli.console import note
from keepset.errors import BudgetError, KeepsetError


def parse_budgets(text: str) -> list[int | float]:
    """Return the budgets of a list such as `512, 0.25`: entries per head or fractions.

    Raises:
        BudgetError: one is no number, or out of range.
    """
    from keepset.core.budget import KEEP_HELP, Budget

    budgets: list[int | float] = []
    for part in text.split(","):
        try:
            value = ast.literal_eval(part.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BudgetError(f"keep={part.strip()!r} is not a number: {KEEP_HELP}.")
        if isinstance(value, int) and value.bit_length() > 63:
            raise BudgetError(f"keep={part.strip()} is too large a number: {KEEP_HELP}.")
        if isinstance(value, int) and value == 1:
            note("keep=1 is one entry of every head; all entries are 1.0.")
        budgets.append(Budget(value).keep or value)
    return budgets


def parse_indices(text: str) -> list[int] | None:
    """Return different whole numbers from 0, rising; None if the text is no such list."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        return None
    return sorted({int(part) for part in parts})


def parse_whole(text: str, option: str) -> list[int]:
    """Return whole numbers from a list, each once.

    Args:
        text: the list.
        option: the option's name, for the error.

    Raises:
        KeepsetError: the text is no such list.
    """
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise KeepsetError(f"--{option} {text!r} is no list of whole numbers: write them as 1,2,3.") from None
