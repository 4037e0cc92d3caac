"""`QueryRecords`: how far the queries of requests are recorded whose next compression will look at them.

Nothing that reaches the attention layers names a request. What does is the page that holds its newest token: no
other request may write to it. So a record is filed under that page's id and moved along in every step; a request
that ended, was aborted or was preempted leaves one behind, whose slot goes to who needs it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keepset.core.accumulators import Accumulators


@dataclass
class QueryRecord:
    """One request's.

    Attributes:
        slot: its place in what layers hold (`PassingQueries`).
        page: that holds its newest token.
        prompt: tokens of its prompt.
        start: position of the first token that was recorded without a gap.
        length: tokens that the request has had.
        point: length at the event that the sums are for.
        added: length up to which queries are added up for it.
        written: length at which they were last; 0 where none is yet, and entries have no numbers.
        shares: pages of its prompt that other requests may have, too, until its first compression.
        own: whether one of them does whose window is open, so that its sums are its own (`OwnSums`).
        held: newest queries that wait in whole, because they came behind an event of their own step.
        chunks: what its prompt told each layer, where the recipe looks at all of it.
        prompt_tokens: of which that is, from the first on.
    """

    slot: int
    page: int
    prompt: int
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


class Move(NamedTuple):
    """A request in a step.

    Attributes:
        page_before, page: that hold its newest token before and after the step.
        prompt: tokens of its prompt.
        before, after: tokens that it has had.
        start: position of the first that is recorded now.
    """

    page_before: int
    page: int
    prompt: int
    before: int
    after: int
    start: int


def slots_for(requests: int) -> int:
    """Places that layers hold: a quarter more than requests run, for those that ended unseen or pause."""
    return requests + max(requests // 4, 2)


class QueryRecords:
    """Of at most so many requests that run."""

    def __init__(self, requests: int) -> None:
        self._records: OrderedDict[int, QueryRecord] = OrderedDict()
        self._free = list(reversed(range(slots_for(requests))))

    def follow(self, moves: Sequence[Move]) -> list[QueryRecord]:
        """The records of these requests, moved along; a fresh one where there is none."""
        # First all that go on, so that none of their slots is given away.
        going_on = [self._claim(move) for move in moves]
        for move in moves:
            self._forget(move.page)  # another request's, that held this page before
        return [self._moved(move, record) for move, record in zip(moves, going_on, strict=True)]

    def share_pages(self, record: QueryRecord) -> bool:
        """Whether a page of this request is another's, too, that has numbers of entries at the pages' slots."""
        others = (other for other in self._records.values() if other is not record and other.point and not other.own)
        # Where two begin alike their pages lie at the same places.
        return any(mine == theirs for other in others for mine, theirs in zip(record.shares, other.shares))  # noqa: B905

    def free(self, records: Sequence[QueryRecord]) -> None:
        """Forgets requests that are not recorded any more."""
        for record in records:
            if self._records.get(record.page) is record:
                self._forget(record.page)

    def _moved(self, move: Move, record: QueryRecord | None) -> QueryRecord:
        record = record or QueryRecord(self._slot(), move.page, move.prompt, move.start, move.before)
        record.length, record.page = move.after, move.page
        self._records[move.page] = record
        return record

    def _forget(self, page: int) -> None:
        if (record := self._records.pop(page, None)) is not None:
            self._free.append(record.slot)

    def _claim(self, move: Move) -> QueryRecord | None:
        record = self._records.get(move.page_before) if move.before else None
        # A request that begins behind another's pages may find that one's record there.
        if record is None or (record.length, record.prompt) != (move.before, move.prompt):
            return None
        return self._records.pop(move.page_before)

    def _slot(self) -> int:
        if not self._free:  # the one that nobody has moved along for longest
            self._forget(next(iter(self._records)))
        return self._free.pop()
