"""Heads that keep different numbers of entries: what is remembered of each request, and the tables of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.kernels import subpages
from keepset.kernels.paged import FiledLayouts, PagedTokens, follow_layouts
from keepset.kernels.paged_window import EntriesInPages
from keepset.kernels.subpages import Group, Layout


class OccupiedPages(NamedTuple):
    """Where the entries of an event's requests lie in one layer.

    Attributes:
        subpages: that hold each head's entries, in their order.
        packed: of each head the first so many were packed after the event before (`EntriesInPages`).
        entries: entries that each head has.
    """

    subpages: Int[Tensor, "rows kv_heads pages"]
    packed: Int[Tensor, "rows kv_heads"]
    entries: Int[Tensor, "rows kv_heads"]


class PagesOfLayers:
    """The pages of an event's requests, layer by layer, as they are asked for; the host waits for their number once.

    Args:
        entries: says where the requests' entries lie, once the step has got that far.
        block_size: of the cache.
        group: the layers.
    """

    def __init__(self, entries: Callable[[], EntriesInPages], block_size: int, group: Group) -> None:
        self._make, self._block_size, self._group = entries, block_size, group

    def __call__(self, place: int) -> OccupiedPages:
        """Those of a layer, by its place in its group."""
        one = self._entries.of_layer(place)
        entries = subpages.entries(one.layout, one.lengths)
        group, most = self._group._replace(places=range(place, place + 1)), self._pages[place]
        tables = subpages.tables(one.layout, entries, one.block_table, self._block_size, most, group)
        return OccupiedPages(tables[:, 0].long(), one.packed[:, 0], entries[:, 0])

    @cached_property
    def _entries(self) -> EntriesInPages:
        return self._make()

    @cached_property
    def _pages(self) -> list[int]:
        """Of the head with most entries, in each layer."""
        entries = subpages.entries(self._entries.layout, self._entries.lengths)
        return [-(-most // self._block_size) for most in entries.amax((0, 2)).tolist()]


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
    layout: Layout
    block_size: int
    group: Group
    tokens: PagedTokens | None
    others: bool
    tables: Int[Tensor, "n layers kv_heads pages"] | None = None

    def of_layer(self, place: int) -> Layout:
        """What the pages of one layer's heads follow from."""
        return Layout(*(part[:, place : place + 1] for part in self.layout))


class PerHeadTables:
    """The state of all requests, filed under the page that holds a request's newest token.

    No other request writes to that page, and the state is written anew in every step before it is read. So it needs
    no request's name, and reordering, aborts, preemption and the reuse of pages cannot confuse it.
    """

    def __init__(self, layers: int, kv_heads: int, block_size: int, blocks: int, max_requests: int) -> None:
        self._layers, self._kv_heads, self._block_size, self._blocks = layers, kv_heads, block_size, blocks
        self.group = Group(range(layers), layers, blocks)
        self._max_requests = max_requests
        self._rows: Layout | None = None
        self._filed: FiledLayouts | None = None
        self._lost = _Lost()
        self._steady = False
        self.step: RaggedStep

    def file(self, page: int, layout: Layout) -> None:
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
        layout = Layout(*(part[: len(before)] for part in room))
        self.step = RaggedStep(pages, after, layout, self._block_size, self.group, tokens, others)
        self._steady = alike and not eventful
        return self.step

    def captured(self, tokens: PagedTokens) -> RaggedStep:
        """What a graph notes of nobody's step: it finds the layouts of those that replay it at the same addresses."""
        rows = len(tokens.lengths)
        layout = Layout(*(part[:rows] for part in self._room(rows, tokens.lengths.device)))
        nobody = torch.zeros_like(tokens.lengths)
        return RaggedStep(nobody, tokens.lengths, layout, self._block_size, self.group, tokens, others=False)

    def _room(self, rows: int, device: torch.device) -> Layout:
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
        layout = Layout(*(part[rows] for part in self.step.layout))
        return EntriesInPages(layout, block_table, self.step.lengths[rows], layout.counts, longest)

    def left(self, blocks: Sequence[int], length: int) -> PagesOfLayers:
        """Where the entries of a request of so many tokens lie, after its last step and event.

        Raises:
            RuntimeError: it is not known any more.
        """
        page, filed = blocks[(length - 1) // self._block_size], self._filed
        if filed is None or filed.tokens[page] != length:
            raise RuntimeError("keepset lost the page tables of a request that has ended.")
        layout = Layout(*(part[page][None].long() for part in filed.layout))
        table, lengths = (torch.tensor(numbers, device=filed.tokens.device) for numbers in ([blocks], [length]))
        entries = EntriesInPages(layout, table, lengths, layout.counts, length)
        return PagesOfLayers(lambda: entries, self._block_size, self.group)

    def reassign(
        self,
        rows: Int[Tensor, " rows"],
        block_table: Int[Tensor, "rows width"],
        first: Int[Tensor, " rows"] | None,
        place: int,
        counts: Int[Tensor, "rows kv_heads"],
    ) -> Int[Tensor, "rows kv_heads pages"] | None:
        """Deals a layer's pages out anew; None where so many do not fit, and the layer stays as it is.

        `first` are the blocks that the scheduler will not free, where it knows; else the last that do.
        """
        lengths = self.step.lengths[rows]
        blocks = -(-lengths // self._block_size)
        last = blocks - subpages.blocks_needed(counts, lengths, self._block_size)
        first = last if first is None else first
        if bool(((first > last) | (first < self.step.layout.first[rows, place])).any()):
            return None
        layout = Layout(counts[:, None], lengths[:, None], first[:, None], torch.zeros_like(first)[:, None])
        assert self._filed is not None
        for part, now in zip(self._filed.layout, layout, strict=True):
            part[self.step.pages[rows], place] = now[:, 0].to(part.dtype)
        most = -(-int(counts.max()) // self._block_size)
        return subpages.tables(layout, counts[:, None], block_table, self._block_size, most)[:, 0].long()

    def _file(self, device: torch.device) -> FiledLayouts:
        if self._filed is None:
            self._filed = FiledLayouts.empty(self._blocks, self._layers, self._kv_heads, device)
        return self._filed

    def unused_blocks(self, page: int) -> int:
        """Leading blocks of the request whose newest token is in this page that no layer uses any more."""
        assert self._filed is not None
        return int(self._filed.layout.first[page].min())


class _Lost:
    """Whether a request's state was not where it must be, as a device finds out and the host learns without waiting."""

    def __init__(self) -> None:
        self._there: Int[Tensor, " 1"] | None = None
        self._here: Int[Tensor, " 1"]

    def on(self, device: torch.device) -> Int[Tensor, " 1"]:
        """The device's word, 1 once one was lost."""
        if self._there is None:
            self._there = torch.zeros(1, dtype=torch.int32, device=device)
            self._here = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        return self._there

    def check(self) -> None:
        """Raises what is known of the steps so far: of a GPU, what it had told when this was called before."""
        assert self._there is not None
        if self._there.device.type == "cpu":
            self._here = self._there
        if self._here[0]:
            raise RuntimeError("keepset lost the page tables of a request that was compressed.")
        self._here.copy_(self._there, non_blocking=True)


RequestKey = tuple[str, int, int]
"""A request's id, how often it was preempted, and a group of layers."""


class FreedBlocks:
    """What compressions emptied, on its way from the layers to the scheduler, in a process that computes."""

    def __init__(self) -> None:
        self._events: list[tuple[PerHeadTables, int]] = []
        self._keys: dict[int, RequestKey] = {}
        self._emptied: dict[RequestKey, int] = {}

    def add(self, tables: PerHeadTables, page: int) -> None:
        """A request whose newest token is in this page is to be compressed after this step."""
        self._events.append((tables, page))

    def expect(self, keys: dict[int, RequestKey]) -> None:
        """Says whose pages those are; after the step is planned, and before the next."""
        self._keys |= keys

    def settle(self) -> None:
        """All of these events are over."""
        events, keys = self._events, self._keys
        self._events, self._keys = [], {}
        self._emptied |= {keys[page]: tables.unused_blocks(page) for tables, page in events if page in keys}

    def drain(self) -> dict[RequestKey, int]:
        """Leading blocks that are empty since it was asked last, of requests whose pages were expected."""
        emptied, self._emptied = self._emptied, {}
        return emptied
