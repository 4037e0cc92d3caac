"""Budgets as commands take them: fractions or entries per head, separated by commas."""

from __future__ import annotations

import ast

from keepset.errors import KeepsetError


def keeps(text: str) -> list[int | float]:
    """The numbers of a list such as `512, 0.25`.

    Raises:
        KeepsetError: one of them is no budget.
    """
    from keepset.core.budget import KEEP_HELP, Budget

    found: list[int | float] = []
    for part in text.split(","):
        try:
            value = ast.literal_eval(part.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise KeepsetError(f"keep={part.strip()!r} is not a number: {KEEP_HELP}.")
        if isinstance(value, int) and value.bit_length() > 63:
            raise KeepsetError(f"keep={part.strip()} is too large a number: {KEEP_HELP}.")
        found.append(Budget(value).keep or value)
    return found
