"""Reread: all of the prompt's own queries look at it once more, and all heads share one budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keepset.allocate.composed import Composed
from keepset.allocate.pool import Pool
from keepset.method import Method
from keepset.methods.echo import Echo


@dataclass(frozen=True)
class Reread(Composed):
    """Keeps what the prompt's own queries would look at right after it: `pool(echo)`.

    For a context that is asked about later: every token is looked for, so facts are found that nobody has come back
    to yet. Heads that look far get many entries, heads that look at the first and newest tokens few. It takes one
    pass, where `kvzip` and `kvcompose` take two; `echo` says why it works, and docs/results.md what was measured.
    """

    name: ClassVar[str] = "reread"
    paper: ClassVar[str] = "none"

    @property
    def composition(self) -> Method:
        """One pool of what all queries would look at."""
        return Pool(Echo())
