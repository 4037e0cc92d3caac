"""`FreedBlocks`: what a step's compressions emptied, on its way from the layers to the scheduler."""

from __future__ import annotations

from keepset.paged.page_tables import RaggedTables

Mark = tuple[str, int, int]
"""A request's id, how often it was preempted, and a group of layers."""


class FreedBlocks:
    """Requests that were compressed in this step, in a process that computes."""

    def __init__(self) -> None:
        self._events: list[tuple[RaggedTables, int]] = []

    def put(self, tables: RaggedTables, page: int) -> None:
        """A request whose newest token is in this page is compressed in this step."""
        self._events.append((tables, page))

    def take(self, marks: dict[int, Mark]) -> dict[Mark, int]:
        """What was emptied, once the step is done."""
        events, self._events = self._events, []
        return {marks[page]: int(tables.first_blocks(page).min()) for tables, page in events if page in marks}


freed_blocks = FreedBlocks()
