"""`EmptiedBlocks`: how many blocks events have emptied, if that depends on the data."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Int
from torch import Tensor

from keepset.kernels.dispatch import AsyncHostCopy
from keepset.paged.layout_table import LayoutTable

RequestKey = tuple[str, int, int]
"""A request's id, how often it was preempted, and a group of layers."""


class EmptiedBlocks:
    """Counts of freed blocks, in a process that computes, for recipes whose counts depend on the data."""

    def __init__(self) -> None:
        self._events: list[tuple[LayoutTable, Int[Tensor, " rows"], AsyncHostCopy]] = []
        self._keys: dict[int, RequestKey] = {}
        self._emptied: list[tuple[list[RequestKey | None], AsyncHostCopy]] = []

    def add(self, table: LayoutTable, pages: Int[Tensor, " rows"]) -> None:
        """Note an event that follows the step which is planned.

        Args:
            table: has the requests' layouts.
            pages: the pages that hold the requests' newest tokens.
        """
        self._events.append((table, pages, AsyncHostCopy(pages)))

    def expect(self, keys: Mapping[int, RequestKey]) -> None:
        """Note the requests by the pages of their newest tokens; called between the plans of two steps."""
        self._keys |= keys

    def settle(self) -> None:
        """Count the blocks that the events have emptied; called once all of them are over."""
        for table, pages, copy in self._events:
            whose = [self._keys.get(page) for page in copy.tolist()]
            self._emptied.append((whose, AsyncHostCopy(table.unused_blocks(pages))))
        self._events, self._keys = [], {}

    def drain(self) -> dict[RequestKey, int]:
        """Return how many leading blocks are empty, for each request whose event has ended since the last call."""
        emptied, self._emptied = self._emptied, []
        numbers = [zip(whose, copy.tolist(), strict=True) for whose, copy in emptied]
        return {key: blocks for event in numbers for key, blocks in event if key is not None}
