"""`Prompts`: what the whole prompt of a request tells the layers of a group, taken in chunk after chunk."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.accumulate import Accumulators
from keepset.core.feature import Needs


def looks_at_all(needs: Needs) -> bool:
    """Whether what is needed takes every token of a prompt."""
    return bool(Accumulators(needs))


@dataclass
class Prompts:
    """What one request's prompt has told so far.

    Attributes:
        layers: of the group, one after another.
        tokens: of the prompt that were seen, from its first on.
    """

    layers: list[Accumulators]
    tokens: int = 0
