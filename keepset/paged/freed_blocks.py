"""`FreedBlocks`: what compressions have emptied, on its way from the layers to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Int
from torch import Tensor

from keepset.kernels.dispatch import AsyncHostCopy
from keepset.paged.request_table import RequestTable

RequestKey = tuple[str, int, int]
"""A request's id, how often it was preempted, and a group of layers."""


class FreedBlocks:
    """Counts of freed blocks, in a process that computes, for recipes whose counts depend on the data."""

    def __init__(self) -> None:
        self._events: list[tuple[RequestTable, Int[Tensor, " rows"], AsyncHostCopy]] = []
        self._keys: dict[int, RequestKey] = {}
        self._emptied: list[tuple[list[RequestKey | None], AsyncHostCopy]] = []

    def add(self, table: RequestTable, pages: Int[Tensor, " rows"]) -> None:
        """Note an event that follows the step which is planned.

        Args:
            table: of the group's requests.
            pages: the pages that hold the newest tokens of the event's requests.
        """
        self._events.append((table, pages, AsyncHostCopy(pages)))

    def expect(self, keys: Mapping[int, RequestKey]) -> None:
        """Say whose newest tokens are in these pages, after the step is planned and before the next."""
        self._keys |= keys

    def settle(self) -> None:
        """Ask how many blocks the events have emptied, now that all of them are over."""
        for table, pages, copy in self._events:
            whose = [self._keys.get(page) for page in copy.tolist()]
            self._emptied.append((whose, AsyncHostCopy(table.unused_blocks(pages))))
        self._events, self._keys = [], {}

    def drain(self) -> dict[RequestKey, int]:
        """Return the leading blocks that are empty, of the requests whose events are over since the last call."""
        emptied, self._emptied = self._emptied, []
        numbers = [zip(whose, copy.tolist(), strict=True) for whose, copy in emptied]
        return {key: blocks for event in numbers for key, blocks in event if key is not None}
