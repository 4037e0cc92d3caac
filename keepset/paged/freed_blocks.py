"""`FreedBlocks`: what a step's compressions emptied, on its way from the layers to the scheduler."""

from __future__ import annotations

from keepset.paged.page_tables import PerHeadTables

RequestKey = tuple[str, int, int]
"""A request's id, how often it was preempted, and a group of layers."""


class FreedBlocks:
    """Requests that were compressed in this step, in a process that computes."""

    def __init__(self) -> None:
        self._events: list[tuple[PerHeadTables, int]] = []

    def add(self, tables: PerHeadTables, page: int) -> None:
        """A request whose newest token is in this page is compressed in this step."""
        self._events.append((tables, page))

    def drain(self, keys: dict[int, RequestKey]) -> dict[RequestKey, int]:
        """Leading blocks that are empty once the step is done, of the requests whose newest tokens' pages are given."""
        events, self._events = self._events, []
        return {keys[page]: int(tables.first_blocks(page).min()) for tables, page in events if page in keys}
