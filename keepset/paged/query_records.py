"""`QueryRecord`: how far the queries of a request are recorded, because its next compression will look at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keepset.core.accumulators import Accumulators


@dataclass
class QueryRecord:
    """What is recorded of one request. `RequestTable` files it by page.

    Attributes:
        slot: the request's slot in the rings of the layers (`QueryRing`).
        start: position of the first token that was recorded without a gap.
        length: tokens that the request had when it was recorded last.
        point: tokens at the event that its sums are for.
        added: position up to which its queries are added up.
        written: tokens at which they were added up last; 0 if they were not yet, and entries have no numbers.
        shares: pages of its prompt that other requests may have, too, until its first event.
        own: whether its sums are in private columns, because another request with an open window has a page of it.
        held: how many of its newest queries are held back, because they came behind an event of their own step.
        chunks: for each layer what was collected of its prompt, if the recipe looks at whole prompts.
        prompt_tokens: how many of the prompt's first tokens were collected.
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
        """Start the sums of the event at `point`, unless they have begun.

        Args:
            point: tokens at the event.
            begins: position of the first query in its window.
        """
        if self.point != point:
            self.point, self.added, self.written, self.held = point, begins, 0, 0


def slots_for(requests: int) -> int:
    """Return how many slots layers need: a quarter more than requests run, for requests that ended unseen or pause."""
    return requests + max(requests // 4, 2)
