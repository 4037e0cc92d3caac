"""The pages of heads that have different numbers of entries, at an event and when a request has ended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.keep_set import LazyHostInts
from keepset.kernels import page_layout
from keepset.kernels.dispatch import AsyncHostCopy
from keepset.kernels.page_layout import PageGroup, PageLayout
from keepset.kernels.paged_arguments import EntriesInPages, FiledLayouts
from keepset.paged.eviction_event import EventPages, OccupiedPages, PageAssignment


class RaggedPages:
    """The pages of some requests whose heads have different numbers of entries.

    The copy of the heads' sizes to the host begins at once. The host waits for it when somebody asks for a size.

    Args:
        entries: where the entries lie.
        group: the layers.
        block_size: tokens per page.
    """

    def __init__(self, entries: EntriesInPages, group: PageGroup, block_size: int) -> None:
        self._entries, self._group, self._block_size = entries, group, block_size
        heads = page_layout.entries(entries.layout, entries.lengths).transpose(0, 1)
        self._copy = AsyncHostCopy(torch.stack((heads.amax(-1), heads.sum(-1))))

    @cached_property
    def _sizes(self) -> tuple[list[list[int]], list[list[int]]]:
        """The entries of the largest head, and those of all heads, by layer and row."""
        largest, total = self._copy.tolist()
        return largest, total

    @property
    def width(self) -> int:
        """The number of entries of the largest head."""
        return self._largest(range(self._group.layers))

    def _largest(self, places: range) -> int:
        return max(max(self._sizes[0][place]) for place in places)

    def held(self, places: range) -> Sequence[int]:
        """Return the number of entries of each request in each layer, layer after layer."""
        return [entries for place in places for entries in self._sizes[1][place]]

    def occupied(self, places: range) -> OccupiedPages:
        """Return where the entries lie in these layers."""
        some = self._entries.of_layers(places)
        entries = page_layout.entries(some.layout, some.lengths)
        pages = -(-self._largest(places) // self._block_size)
        group = self._group._replace(places=places)
        tables = page_layout.tables(some.layout, entries, some.block_table, self._block_size, pages, group)
        tables = page_layout.to_group_pages(tables.transpose(0, 1), group, entries.shape[-1])
        parts = tables, some.packed.transpose(0, 1), entries.transpose(0, 1)
        return OccupiedPages(*(part.flatten(0, 1) for part in parts))


class RaggedEventPages(RaggedPages, EventPages):
    """The pages of an event's requests.

    Args:
        entries: where the entries lie before the event.
        group: the layers.
        block_size: tokens per page.
        filed: the layouts of all requests, of which the event writes some anew.
        pages: the page that each request's layout is filed under.
        first: the first block of each request that the scheduler will not free; None if it does not know. Then what
            stays takes the last blocks that it fits in.
    """

    def __init__(
        self,
        entries: EntriesInPages,
        group: PageGroup,
        block_size: int,
        filed: FiledLayouts,
        pages: Int[Tensor, " rows"],
        first: Int[Tensor, " rows"] | None,
    ) -> None:
        super().__init__(entries, group, block_size)
        self._filed, self._pages, self._first = filed.layout, pages, first

    def assign(self, places: range, counts: Int[Tensor, "layers_rows kv_heads"]) -> PageAssignment:
        size, table, layers = self._block_size, self._entries.block_table, slice(places.start, places.stop)
        counts = counts.unflatten(0, (len(places), -1)).transpose(0, 1)
        lengths = self._entries.lengths[:, None].expand(counts.shape[:2])
        last = -(-lengths // size) - page_layout.blocks_needed(counts, lengths, size)
        first = last if self._first is None else self._first[:, None].expand_as(last)
        fits = (first <= last) & (first >= self._entries.layout.first[:, layers])
        counts = counts.where(fits[..., None], 0)

        def take(most: int) -> Tensor:
            layout = PageLayout(counts, lengths, first, torch.zeros_like(first))
            for part, now in zip(self._filed, layout, strict=True):
                in_layers = part[:, layers]
                fit = fits.view(*fits.shape, *[1] * (now.ndim - 2))
                in_layers[self._pages] = now.to(part.dtype).where(fit, in_layers[self._pages])
            group = self._group._replace(places=places)
            tables = page_layout.tables(layout, counts, table, size, -(-most // size)).transpose(0, 1)
            return page_layout.to_group_pages(tables, group, counts.shape[-1]).flatten(0, 1)

        return PageAssignment(LazyHostInts(fits.t().long()), take)
