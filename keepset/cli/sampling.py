"""How tokens are drawn: the options that commands have in common, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepset.errors import KeepsetError


@dataclass(frozen=True)
class Sampling:
    """How many new tokens, and how they are drawn.

    Attributes:
        tokens: at most so many; `option` is what the command calls them.
        temperature: 0 for greedy decoding.
    """

    tokens: int
    temperature: float = 0.0
    seed: int = 0
    option: str = "--max-new-tokens"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise KeepsetError(f"{self.option} {self.tokens} is not a number of tokens: use an integer from 1.")
        # Divided by less, logits overflow.
        if not (self.temperature == 0 or 0.01 <= self.temperature <= 100):
            raise KeepsetError(
                f"--temperature {self.temperature} is out of range: use 0 for greedy decoding, or 0.01 to 100."
            )
        if not 0 <= self.seed < 2**63:
            raise KeepsetError(f"--seed {self.seed} is out of range: use an integer from 0 to {2**63 - 1}.")

    @property
    def options(self) -> dict[str, Any]:
        """For `model.generate`."""
        options: dict[str, Any] = {"do_sample": self.temperature > 0, "max_new_tokens": self.tokens}
        return {**options, "temperature": self.temperature} if self.temperature > 0 else options
