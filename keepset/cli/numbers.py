"""Lists of numbers as commands take them, separated by commas."""

import ast

from keepset.cli.console import note
from keepset.errors import BudgetError, KeepsetError


def parse_budgets(text: str) -> list[int | float]:
    """The budgets of a list such as `512, 0.25`: entries per head or fractions."""
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
    """Different whole numbers from 0, rising; None where the text is no such list."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        return None
    return sorted({int(part) for part in parts})


def parse_whole(text: str, option: str) -> list[int]:
    """Whole numbers from a list, each once."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise KeepsetError(f"--{option} {text!r} is no list of whole numbers: write them as 1,2,3.") from None
