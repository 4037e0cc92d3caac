"""`Schedule`: when a cache is compressed."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.errors import BudgetError


@dataclass(frozen=True)
class Schedule:
    """When compression happens.

    Attributes:
        prefill: once, at the prompt's end; a prefill in chunks counts as one.
        every: after every so many decoded tokens; None for never.

    Raises:
        BudgetError: when it is made so that nothing is ever compressed, or of what is no number of tokens.
    """

    prefill: bool = True
    every: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.prefill, bool):
            raise BudgetError(f"prefill={self.prefill!r} is neither True nor False.")
        if self.every is not None and (
            not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1
        ):
            raise BudgetError(f"every={self.every!r} is not a number of tokens: use an integer from 1.")
        if not self.prefill and self.every is None:
            raise BudgetError("prefill=False needs every=..., or nothing is ever compressed.")
