"""`QueryRecord`: how far the queries of a request are recorded, because its next compression will look at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keepset.core.accumulators import Accumulators


@dataclass
class QueryRecord:
    """What is recorded of one request. `RequestTable` files it by page.

    Attributes:
        slot: its slot in the rings of the layers (`QueryRing`).
        start: position of the first token that was recorded without a gap.
        length: tokens that the request had when it was recorded last.
        point: length at the event that the sums are for.
        added: length up to which queries are added up for it.
        written: length at which they were added up last; 0 where none is yet, and entries have no numbers.
        shares: pages of its prompt that other requests may have, too, until its first compression.
        own: whether one of them does whose window is open, so that its sums are in private columns.
        held: newest queries that are held back, because they came behind an event of their own step.
        chunks: what its prompt told each layer, where the recipe looks at all of it.
        prompt_tokens: how many of the prompt's first tokens that is.
    """

    slot: int
    start: int
    length: int
    point: int = 0
    added: int = 0
    written: int = 0
    shares: Sequence[int] = ()
    own: bool = False
    held: int = 0
    chunks: list[Accumulators] = field(default_factory=list)
    prompt_tokens: int = 0

    def aim(self, point: int, begins: int) -> None:
        """What is added up from now on is for the event there, whose window begins at this position."""
        if self.point != point:
            self.point, self.added, self.written, self.held = point, begins, 0, 0


def slots_for(requests: int) -> int:
    """Places that layers hold: a quarter more than requests run, for those that ended unseen or pause."""
    return requests + max(requests // 4, 2)
