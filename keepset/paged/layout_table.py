"""`LayoutTable`: the layouts of heads of different lengths. `EmptiedBlocks`: how many blocks events have emptied."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.kernels.dispatch import AsyncHostCopy
from keepset.kernels.page_layout import FiledLayouts, PageLayout
from keepset.kernels.paged import follow_layouts
from keepset.paged.engine import EngineSize

RequestKey = tuple[str, int, int]
"""A request's id, how often it was preempted, and a group of layers."""


class LayoutTable:
    """The layouts of the requests of one group of layers.

    Args:
        layers, kv_heads: of the group, in this process.
        block_size: tokens per page.
        size: numbers that the engine fixes when it starts.
    """

    def __init__(self, layers: int, kv_heads: int, block_size: int, size: EngineSize) -> None:
        self._shape, self._block_size, self._drafts = (size.blocks, layers, kv_heads), block_size, size.drafts
        self._layouts: FiledLayouts | None = None
        # Whether a request's layout was not where it must be: on the device, and a copy that the host reads.
        self._lost: Int[Tensor, " 1"]
        self._host_lost: Int[Tensor, " 1"]

    def file(self, page: int, layout: PageLayout) -> None:
        """File the layout of one request, once all events that are due are over.

        Args:
            page: the page that holds the request's newest token.
            layout: the layout, as its only row.
        """
        filed = self._on(layout.counts.device)
        for part, values in zip(filed.layout, layout, strict=True):
            part[page] = values[0].to(part)
        filed.tokens[page] = int(layout.length[0, 0])

    def move(
        self,
        block_table: Int[Tensor, "rows width"],
        before: Int[Tensor, " rows"],
        after: Int[Tensor, " rows"],
        required: Int[Tensor, " rows"],
        layout: PageLayout,
    ) -> Int[Tensor, " rows"]:
        """Move the layouts of a step's requests to the pages of their newest tokens, without a host sync.

        Args:
            block_table: the engine's block table.
            before: tokens of each request before the step.
            after: tokens of each request after the step.
            required: 1 for requests that must have a layout.
            layout: filled with the layouts, row by row; with zeros for requests that have none and need none.

        Returns:
            The pages.

        Raises:
            RuntimeError: a request is not where it was left. With a GPU the error comes some steps later, because
                waiting for the GPU would take longer than the step's planning.
        """
        filed = self._on(block_table.device)
        step = block_table, before, after, required
        pages = follow_layouts(filed, *step, self._lost, self._block_size, layout, self._drafts)
        lost = self._lost if self._lost.device.type == "cpu" else self._host_lost  # on a GPU: as of the call before
        if lost[0]:
            raise RuntimeError("keepset lost the page tables of a request that was compressed.")
        self._host_lost.copy_(self._lost, non_blocking=True)
        return pages

    def at(self, page: int, tokens: int) -> PageLayout:
        """Return the layout of a request, as its only row.

        Args:
            page: the page that holds the request's newest token.
            tokens: tokens of the request.

        Raises:
            RuntimeError: the request is not known any more.
        """
        filed = self._layouts
        if filed is None or filed.tokens[page] != tokens:
            raise RuntimeError("keepset lost the page tables of a request that has ended.")
        return PageLayout(*(part[page][None].long() for part in filed.layout))

    def unused_blocks(self, pages: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
        """Return how many leading blocks no layer uses any more, of the requests with their newest tokens here."""
        return self.filed.layout.first[pages].amin(1)

    @property
    def filed(self) -> FiledLayouts:
        """The layouts of all requests, once a step was planned."""
        assert self._layouts is not None
        return self._layouts

    def _on(self, device: torch.device) -> FiledLayouts:
        if self._layouts is None:
            self._layouts = FiledLayouts.empty(*self._shape, device)
            self._lost = torch.zeros(1, dtype=torch.int32, device=device)
            self._host_lost = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        return self._layouts


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
            request_keys = [self._keys.get(page) for page in copy.tolist()]
            self._emptied.append((request_keys, AsyncHostCopy(table.unused_blocks(pages))))
        self._events, self._keys = [], {}

    def drain(self) -> dict[RequestKey, int]:
        """Return how many leading blocks are empty, for each request whose event has ended since the last call."""
        emptied, self._emptied = self._emptied, []
        numbers = [zip(request_keys, copy.tolist(), strict=True) for request_keys, copy in emptied]
        return {key: blocks for event in numbers for key, blocks in event if key is not None}
