"""`QueryWindows`: the newest queries of the requests whose next compression will look at them.

Nothing that reaches the attention layers names a request. What does is the page that holds its newest token: no
other request may write to it. So a record is filed under that page's id and moved along in every step; a request
that ended, was aborted or was preempted leaves one behind, which is thrown out once there are more records than
requests can run in two steps.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.accumulator import Accumulators


@dataclass(frozen=True)
class QueryCapture:
    """Queries to record: places of `QueryWindows` for some of a step's queries."""

    queries: Int[Tensor, " n"]
    slots: Int[Tensor, " n"]
    places: Int[Tensor, " n"]


@dataclass
class QueryRecord:
    """One request's recorded queries.

    Attributes:
        slot: its place in the rings.
        start: position of the first token that was recorded without a gap.
        length: tokens that the request has had.
        prompt: what its prompt told each layer, where the recipe looks at all of it.
        prompt_tokens: of which that is, from the first on.
    """

    slot: int
    start: int
    length: int
    prompt: list[Accumulators] = field(default_factory=list)
    prompt_tokens: int = 0


class QueryWindows:
    """Rings of `window` queries per layer and request; position p lies at p mod window."""

    def __init__(self, layers: int, window: int, requests: int) -> None:
        self.window = window
        self._requests = requests
        self._layers = layers
        self._rings: Tensor | None = None
        self._records: OrderedDict[int, QueryRecord] = OrderedDict()
        self._free: list[int] = []
        self._slots = 0

    def follow(self, page_before: int, page: int, start: int, before: int, length: int) -> QueryRecord:
        """The record of a request that went from `before` to `length` tokens, a fresh one where there is none.

        The pages hold its newest token then and now; `start` is the position of the first that is recorded now.
        """
        record = self._records.pop(page_before, None) if before else None
        if record is None or record.length != before:
            if not self._free:
                self._free.append(self._slots)
                self._slots += 1
            record = QueryRecord(self._free.pop(), start, before)
        record.length = length
        self.forget(page)
        self._records[page] = record
        # In the middle of a step: those of the step before, gone or not yet moved along, and those of this one.
        while len(self._records) > 2 * self._requests:
            self._free.append(self._records.popitem(last=False)[1].slot)
        return record

    def forget(self, page: int) -> None:
        """Drops the record of a request that is not recorded any more."""
        if (record := self._records.pop(page, None)) is not None:
            self._free.append(record.slot)

    def add(self, layers: range, queries: Float[Tensor, "layers n heads dim"], capture: QueryCapture) -> None:
        """Writes some of a step's queries to places of these layers' rings."""
        if self._rings is None or self._rings.shape[1] < self._slots:
            grown = queries.new_zeros(self._layers, max(2 * self._slots, 4), self.window, *queries.shape[2:])
            if self._rings is not None:
                grown[:, : self._rings.shape[1]] = self._rings
            self._rings = grown
        self._rings[layers.start : layers.stop, capture.slots, capture.places] = queries

    def read(
        self, layers: range, slots: Int[Tensor, " rows"], positions: Int[Tensor, "rows n"]
    ) -> Float[Tensor, "layers_rows heads n dim"]:
        """Queries at these positions; those before a text's beginning are zero, whatever the rings hold."""
        assert self._rings is not None
        queries = self._rings[layers.start : layers.stop, slots[:, None], positions % self.window]
        return queries.masked_fill((positions < 0)[..., None, None], 0).transpose(2, 3).flatten(0, 1)
