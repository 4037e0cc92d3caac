"""Heads that keep different numbers of entries: what is remembered of each request, and the tables of one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.keep_set import LazyHostInts
from keepset.kernels import page_layout
from keepset.kernels.dispatch import AsyncHostCopy
from keepset.kernels.page_layout import PageGroup, PageLayout
from keepset.kernels.paged import follow_layouts
from keepset.kernels.paged_arguments import EntriesInPages, FiledLayouts, PagedTokens


class OccupiedPages(NamedTuple):
    """Where the entries of an event's requests lie in some layers, layer after layer and row after row.

    Attributes:
        subpages: that hold each head's entries, in their order; numbered through all layers of the group.
        packed: of each head the first so many were packed after the event before (`EntriesInPages`).
        entries: entries that each head has.
    """

    subpages: Int[Tensor, "layers_rows kv_heads pages"]
    packed: Int[Tensor, "layers_rows kv_heads"]
    entries: Int[Tensor, "layers_rows kv_heads"]


@dataclass(frozen=True)
class PageAssignment:
    """Pages for what stays of an event's requests in some layers.

    Attributes:
        fits: 1 for each row of each layer whose entries fit its blocks, else 0, and all of it stays as it is. None: all
            fit.
        take: gives the heads that fit their sub-pages, as many to each as the largest of so many entries needs.
    """

    fits: LazyHostInts | None
    take: Callable[[int], Int[Tensor, "layers_rows kv_heads pages"]]

    @property
    def asked(self) -> list[LazyHostInts]:
        """What the host has to know before it takes them."""
        return [] if self.fits is None else [self.fits]


class EventPages(ABC):
    """The pages of an event's requests in a group's layers."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Entries of the head that has most."""

    @abstractmethod
    def held(self, places: range) -> Sequence[int]:
        """Entries that these layers have of each request, layer after layer."""

    @abstractmethod
    def occupied(self, places: range) -> OccupiedPages:
        """Where they lie."""

    @abstractmethod
    def deal(self, places: range, counts: Int[Tensor, "layers_rows kv_heads"]) -> PageAssignment:
        """Pages for so many entries of each head of these layers."""


class PagesOfLayers:
    """Where heads differ: the device is asked for their sizes when the event comes into sight, and waited for after it.

    Args:
        entries: where the requests' entries lie.
        group: the layers.
        block_size: of the cache.
    """

    def __init__(self, entries: EntriesInPages, group: PageGroup, block_size: int) -> None:
        self._entries, self._group, self._block_size = entries, group, block_size
        entries_of_heads = page_layout.entries(entries.layout, entries.lengths).transpose(0, 1)
        self._sent = AsyncHostCopy(torch.stack((entries_of_heads.amax(-1), entries_of_heads.sum(-1))))

    @cached_property
    def _sizes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Of each layer and row entries of the largest head, and of all."""
        most, all_of_them = self._sent.tolist()
        return most, all_of_them

    @property
    def width(self) -> int:
        """Entries of the head that has most."""
        return self._most(range(self._group.layers))

    def _most(self, places: range) -> int:
        return max(max(self._sizes[0][place]) for place in places)

    def held(self, places: range) -> Sequence[int]:
        """Entries that these layers have of each request, layer after layer."""
        return [entries for place in places for entries in self._sizes[1][place]]

    def occupied(self, places: range) -> OccupiedPages:
        """Where the entries lie in these layers."""
        some = self._entries.of_layers(places)
        entries = page_layout.entries(some.layout, some.lengths)
        pages = -(-self._most(places) // self._block_size)
        group = self._group._replace(places=places)
        tables = page_layout.tables(some.layout, entries, some.block_table, self._block_size, pages, group)
        tables = page_layout.to_group_pages(tables.transpose(0, 1), group, entries.shape[-1])
        parts = tables, some.packed.transpose(0, 1), entries.transpose(0, 1)
        return OccupiedPages(*(part.flatten(0, 1) for part in parts))


class RaggedPages(PagesOfLayers, EventPages):
    """The same of an event.

    Args:
        filed: the layouts of all requests.
        pages: that the event's are filed under.
        first: blocks that the scheduler will not free, where it knows; else the last that will do.
        entries, group, block_size: as there.
    """

    def __init__(
        self,
        entries: EntriesInPages,
        group: PageGroup,
        block_size: int,
        filed: PageLayout,
        pages: Int[Tensor, " rows"],
        first: Int[Tensor, " rows"] | None,
    ) -> None:
        super().__init__(entries, group, block_size)
        self._filed, self._pages, self._first = filed, pages, first

    def deal(self, places: range, counts: Int[Tensor, "layers_rows kv_heads"]) -> PageAssignment:
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
                of_layers = part[:, layers]
                fit = fits.view(*fits.shape, *[1] * (now.ndim - 2))
                of_layers[self._pages] = now.to(part.dtype).where(fit, of_layers[self._pages])
            tables = page_layout.tables(layout, counts, table, size, -(-most // size)).transpose(0, 1)
            return page_layout.to_group_pages(tables, self._group._replace(places=places), counts.shape[-1]).flatten(
                0, 1
            )

        return PageAssignment(LazyHostInts(fits.t().long()), take)


@dataclass
class RaggedStep:
    """Where the heads' entries are in one step.

    Attributes:
        pages: ids of the pages that hold each request's newest token, where its state is filed.
        lengths: tokens of each request after this step.
        layout: what the heads' pages follow from.
        block_size: of the cache.
        group: the layers.
        tokens: those of compressed requests and, where each request has one, all: they are written and attended by the
            layout. None while nothing was compressed: then the engine's own tables say the same for all.
        others: whether there are others, of which the engine's own tables are right.
        tables: sub-pages of each of these tokens' heads, once somebody has asked for them.
    """

    pages: Int[Tensor, " rows"]
    lengths: Int[Tensor, " rows"]
    layout: PageLayout
    block_size: int
    group: PageGroup
    tokens: PagedTokens | None
    others: bool
    tables: Int[Tensor, "n layers kv_heads pages"] | None = None

    def of_layer(self, place: int) -> PageLayout:
        """What the pages of one layer's heads follow from."""
        return PageLayout(*(part[:, place : place + 1] for part in self.layout))


class PerHeadTables:
    """The state of all requests, filed under the page that holds a request's newest token.

    No other request writes to that page, and the state is written anew in every step before it is read. So it needs
    no request's name, and reordering, aborts, preemption and the reuse of pages cannot confuse it.
    """

    def __init__(self, layers: int, kv_heads: int, block_size: int, blocks: int, max_requests: int) -> None:
        self._layers, self._kv_heads, self._block_size, self._blocks = layers, kv_heads, block_size, blocks
        self.group = PageGroup(range(layers), layers, blocks)
        self._max_requests = max_requests
        self._rows: PageLayout | None = None
        self._filed: FiledLayouts | None = None
        self._lost = _Lost()
        self._steady = False
        self.step: RaggedStep

    def file(self, page: int, layout: PageLayout) -> None:
        """Files a request's state, the only row, under the page that holds its newest token; after the last event."""
        filed = self._file(layout.counts.device)
        for part, now in zip(filed.layout, layout, strict=True):
            part[page] = now[0].to(part)
        filed.tokens[page] = int(layout.length[0, 0])
        self._steady = False

    def advance(
        self,
        block_table: Int[Tensor, "rows width"],
        before: Int[Tensor, " rows"],
        after: Int[Tensor, " rows"],
        compressed: Int[Tensor, " rows"],
        eventful: bool,
        tokens: PagedTokens | None,
        others: bool,
        read: bool = False,
    ) -> RaggedStep | None:
        """Moves every request's state along.

        Those `compressed` before must have a state; in an `eventful` step some are, and in one that is `read` layers
        look at entries besides; `tokens` and `others` are as in `RaggedStep`.

        Returns:
            None where the engine's own tables say the same, and no request is compressed.

        Raises:
            RuntimeError: a compressed request is not where it was left. A GPU says so some steps later, because to wait
                for it would take longer than the step's planning.
        """
        device = block_table.device
        filed = self._file(device)
        on_cpu, alike = device.type == "cpu", tokens is not None and tokens.rows is None
        # On a GPU to compare would take longer than to do it anew.
        if on_cpu and alike and not eventful and self._goes_on(block_table, before, after):
            filed.tokens[self.step.pages] = after.int()
            self.step = replace(self.step, lengths=after, tokens=tokens)
            return self.step
        lost = self._lost.on(device)
        room = self._room(len(before), device)
        pages = follow_layouts(filed, block_table, before, after, compressed, lost, self._block_size, room)
        self._lost.check()
        self._steady = False
        if tokens is None and not (eventful or read):
            return None
        layout = PageLayout(*(part[: len(before)] for part in room))
        self.step = RaggedStep(pages, after, layout, self._block_size, self.group, tokens, others)
        self._steady = alike and not eventful
        return self.step

    def captured(self, tokens: PagedTokens) -> RaggedStep:
        """What a graph notes of nobody's step: it finds the layouts of those that replay it at the same addresses."""
        rows = len(tokens.lengths)
        layout = PageLayout(*(part[:rows] for part in self._room(rows, tokens.lengths.device)))
        nobody = torch.zeros_like(tokens.lengths)
        return RaggedStep(nobody, tokens.lengths, layout, self._block_size, self.group, tokens, others=False)

    def _room(self, rows: int, device: torch.device) -> PageLayout:
        """For the layouts of a step's requests, in every step the same."""
        if self._rows is None or len(self._rows.length) < rows:
            most = max(rows, self._max_requests)
            self._rows = FiledLayouts.empty(most, self._layers, self._kv_heads, device).layout
        return self._rows

    def _goes_on(
        self, block_table: Int[Tensor, "rows width"], before: Int[Tensor, " rows"], after: Int[Tensor, " rows"]
    ) -> bool:
        """Whether the requests are those of the step before, and none has a block more: tables stay as they are."""
        if not self._steady or len(before) != len(self.step.pages):
            return False
        rows = torch.arange(len(before))
        old, new = (block_table[rows, (tokens - 1) // self._block_size] for tokens in (before, after))
        return bool(((old == new) & (new == self.step.pages) & (before == self.step.lengths)).all())

    def entries(
        self, rows: Int[Tensor, " rows"], block_table: Int[Tensor, "rows width"], longest: int
    ) -> EntriesInPages:
        """Where the entries of these requests lie; `block_table` has their blocks, and none has more tokens."""
        layout = PageLayout(*(part[rows] for part in self.step.layout))
        return EntriesInPages(layout, block_table, self.step.lengths[rows], layout.counts, longest)

    def export_request(self, blocks: Sequence[int], length: int) -> PagesOfLayers:
        """Where the entries of a request of so many tokens lie, after its last step and event.

        Raises:
            RuntimeError: it is not known any more.
        """
        page, filed = blocks[(length - 1) // self._block_size], self._filed
        if filed is None or filed.tokens[page] != length:
            raise RuntimeError("keepset lost the page tables of a request that has ended.")
        layout = PageLayout(*(part[page][None].long() for part in filed.layout))
        table, lengths = (torch.tensor(numbers, device=filed.tokens.device) for numbers in ([blocks], [length]))
        entries = EntriesInPages(layout, table, lengths, layout.counts, length)
        return PagesOfLayers(entries, self.group, self._block_size)

    def of_event(
        self,
        rows: Int[Tensor, " rows"],
        block_table: Int[Tensor, "rows width"],
        longest: int,
        first: Int[Tensor, " rows"] | None,
    ) -> RaggedPages:
        """The pages of an event of the step that was planned last; what is not said here is as in `entries`.

        `first` are the blocks that the scheduler will not free, where it knows; else the last that do.
        """
        assert self._filed is not None
        return RaggedPages(
            self.entries(rows, block_table, longest),
            self.group,
            self._block_size,
            self._filed.layout,
            self.step.pages[rows],
            first,
        )

    def _file(self, device: torch.device) -> FiledLayouts:
        if self._filed is None:
            self._filed = FiledLayouts.empty(self._blocks, self._layers, self._kv_heads, device)
        return self._filed

    def unused_blocks(self, pages: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
        """Leading blocks of the requests whose newest tokens are in these pages that no layer uses any more."""
        assert self._filed is not None
        return self._filed.layout.first[pages].amin(1)


class _Lost:
    """Whether a request's state was not where it must be, as a device finds out and the host learns without waiting."""

    def __init__(self) -> None:
        self._device_flag: Int[Tensor, " 1"] | None = None
        self._host_flag: Int[Tensor, " 1"]

    def on(self, device: torch.device) -> Int[Tensor, " 1"]:
        """The device's word, 1 once one was lost."""
        if self._device_flag is None:
            self._device_flag = torch.zeros(1, dtype=torch.int32, device=device)
            self._host_flag = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        return self._device_flag

    def check(self) -> None:
        """Raises what is known of the steps so far: of a GPU, what it had told when this was called before."""
        assert self._device_flag is not None
        if self._device_flag.device.type == "cpu":
            self._host_flag = self._device_flag
        if self._host_flag[0]:
            raise RuntimeError("keepset lost the page tables of a request that was compressed.")
        self._host_flag.copy_(self._device_flag, non_blocking=True)


RequestKey = tuple[str, int, int]
"""A request's id, how often it was preempted, and a group of layers."""


class FreedBlocks:
    """What compressions emptied, on its way from the layers to the scheduler, in a process that computes."""

    def __init__(self) -> None:
        self._events: list[tuple[PerHeadTables, Int[Tensor, " rows"], AsyncHostCopy]] = []
        self._keys: dict[int, RequestKey] = {}
        self._emptied: list[tuple[list[RequestKey | None], AsyncHostCopy]] = []

    def add(self, tables: PerHeadTables, pages: Int[Tensor, " rows"]) -> None:
        """Requests whose newest tokens are in these pages are to be compressed after this step."""
        self._events.append((tables, pages, AsyncHostCopy(pages)))

    def expect(self, keys: dict[int, RequestKey]) -> None:
        """Says whose pages those are; after the step is planned, and before the next."""
        self._keys |= keys

    def settle(self) -> None:
        """All of these events are over."""
        for tables, pages, sent in self._events:
            whose = [self._keys.get(page) for page in sent.tolist()]
            self._emptied.append((whose, AsyncHostCopy(tables.unused_blocks(pages))))
        self._events, self._keys = [], {}

    def drain(self) -> dict[RequestKey, int]:
        """Leading blocks that are empty since it was asked last, of requests whose pages were expected."""
        emptied, self._emptied = self._emptied, []
        numbers = [zip(whose, sent.tolist(), strict=True) for whose, sent in emptied]
        return {key: blocks for event in numbers for key, blocks in event if key is not None}
