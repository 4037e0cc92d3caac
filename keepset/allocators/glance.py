"""Glance: a quarter of the prompt's own queries look at it once more, and all heads share one budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keepset.allocators.pool import Pool
from keepset.allocators.preset import Preset
from keepset.core.method import Method
from keepset.methods.prompt_queries import PromptQueries


@dataclass(frozen=True)
class Glance(Preset):
    """Keeps what a quarter of the prompt's own queries would look at right after it: `pool(echo(stride=4))`.

    For a prompt that is answered directly. It takes one pass, and adds a sixth to its time at 2048 tokens; `echo` says
    why it works, and docs/results.md what was measured. A fact that is asked for out of nowhere takes a
    second pass: `reread`.
    """

    name: ClassVar[str] = "glance"
    paper: ClassVar[str] = "none"

    @property
    def composition(self) -> Method:
        """One pool of what every fourth query would look at."""
        return Pool(PromptQueries(stride=4))
