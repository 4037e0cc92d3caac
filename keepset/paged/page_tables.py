"""Heads that keep different numbers of entries: what is remembered of each request, and the tables of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.kernels import subpages
from keepset.kernels.subpages import Layout


class OccupiedPages(NamedTuple):
    """Where the entries of an event's requests lie in one layer.

    Attributes:
        subpages: that hold each head's entries, in their order.
        kept: entries that each head kept at its event before; they are the first.
        entries: entries that each head has.
    """

    subpages: Int[Tensor, "rows kv_heads pages"]
    kept: Int[Tensor, "rows kv_heads"]
    entries: Int[Tensor, "rows kv_heads"]


@dataclass
class PerHeadStep:
    """The heads' page tables in one step.

    Attributes:
        pages: ids of the pages that hold each request's newest token, where its state is filed.
        lengths: tokens of each request after this step.
        layout: what the tables follow from.
        entries: of each head after this step.
        tables: sub-pages of each head.
        slots: where new entries go, layer by layer; None while nothing was compressed: then the engine's own tables
            say the same, and attention needs no others.
        starts: first of each request's queries, and the end of the last one's.
    """

    pages: Int[Tensor, " rows"]
    lengths: Int[Tensor, " rows"]
    layout: Layout
    entries: Int[Tensor, "rows layers kv_heads"]
    tables: Int[Tensor, "rows layers kv_heads pages"]
    slots: Sequence[Int[Tensor, " tokens_heads"]] | None
    starts: Int[Tensor, " rows_plus_1"]


class PerHeadTables:
    """The state of all requests, filed under the page that holds a request's newest token.

    No other request writes to that page, and the state is written anew in every step before it is read. So it needs
    no request's name, and reordering, aborts, preemption and the reuse of pages cannot confuse it.
    """

    def __init__(self, layers: int, kv_heads: int, block_size: int, blocks: int) -> None:
        self._layers, self._kv_heads, self._block_size, self._blocks = layers, kv_heads, block_size, blocks
        self._filed: Layout | None = None
        self._tokens: Tensor
        self._steady = False
        self.step: PerHeadStep

    def file(self, page: int, layout: Layout) -> None:
        """Files a request's state, the only row, under the page that holds its newest token; after the last event."""
        filed = self._file(layout.counts.device)
        for part, now in zip(filed, layout, strict=True):
            part[page] = now[0].to(part)
        self._tokens[page] = int(layout.length[0, 0])

    def advance(
        self,
        block_table: Int[Tensor, "rows width"],
        before: Int[Tensor, " rows"],
        after: Int[Tensor, " rows"],
        starts: Int[Tensor, " rows_plus_1"],
        compressed: list[bool],
        eventful: bool,
        decoding: bool,
    ) -> PerHeadStep | None:
        """Moves every request's state along, and makes the tables that the step needs.

        Those `compressed` before must have a state; in an `eventful` step some are; `decoding`, each has one new token.

        Returns:
            None where the engine's own tables say the same, and no request is compressed.

        Raises:
            RuntimeError: a compressed request is not where it was left.
        """
        filed = self._file(block_table.device)
        rows = torch.arange(before.shape[0], device=before.device)
        old = block_table[rows, (before - 1).clamp(min=0) // self._block_size].long()
        pages = block_table[rows, (after - 1) // self._block_size].long()
        if decoding and not eventful and self._goes_on(old, pages, before):
            return self._next(after)
        self._steady = False
        known = (before > 0) & (self._tokens[old] == before)
        if not all(is_known or not must for is_known, must in zip(known.tolist(), compressed, strict=True)):
            raise RuntimeError("keepset lost the page tables of a request that was compressed.")
        layout = Layout(*(part[old].where(known.view(-1, *(1,) * (part.ndim - 1)), 0) for part in filed))
        for part, now in zip(filed, layout, strict=True):
            part[pages] = now
        self._tokens[pages] = after
        folded = any(compressed)
        if not (folded or eventful):
            return None
        entries = subpages.entries(layout, after)
        # As far as until a request's newest block is full: before that there is no other block to look up.
        coming = entries + (-after % self._block_size)[:, None, None]
        most = -(-int(coming.max()) // self._block_size)
        tables = subpages.tables(layout, coming, block_table, self._block_size, most)
        self.step = PerHeadStep(
            pages=pages,
            lengths=after,
            layout=layout,
            entries=entries,
            tables=tables,
            slots=self._slots(layout, tables, before, starts, decoding).unbind() if folded else None,
            starts=starts,
        )
        self._steady = folded and decoding and not eventful
        return self.step

    def _goes_on(self, old: Int[Tensor, " rows"], pages: Int[Tensor, " rows"], before: Int[Tensor, " rows"]) -> bool:
        """Whether the requests are those of the step before, and none has a block more: tables stay as they are."""
        if not self._steady or len(pages) != len(self.step.pages):
            return False
        return bool(((old == pages) & (pages == self.step.pages) & (before == self.step.lengths)).all())

    def _next(self, after: Int[Tensor, " rows"]) -> PerHeadStep:
        """The step with one token more, which is most of them: nothing but lengths and slots is made anew."""
        self._tokens[self.step.pages] = after
        step = self.step
        slots = self._slots(step.layout, step.tables, step.lengths, step.starts, decoding=True)
        self.step = replace(step, lengths=after, entries=step.entries + 1, slots=slots.unbind())
        return self.step

    def occupied(self, rows: Int[Tensor, " rows"], place: int) -> OccupiedPages:
        """Where the entries of these requests lie in one layer."""
        entries = self.step.entries[rows, place]
        subpages = self.step.tables[rows, place, :, : -(-int(entries.max()) // self._block_size)].long()
        return OccupiedPages(subpages, self.step.layout.counts[rows, place], entries)

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
        for part, now in zip(self._filed, layout, strict=True):
            part[self.step.pages[rows], place] = now[:, 0]
        most = -(-int(counts.max()) // self._block_size)
        return subpages.tables(layout, counts[:, None], block_table, self._block_size, most)[:, 0].long()

    def unused_blocks(self, page: int) -> int:
        """Leading blocks of the request whose newest token is in this page that no layer uses any more."""
        assert self._filed is not None
        return int(self._filed.first[page].min())

    def _slots(self, layout: Layout, tables: Tensor, before: Tensor, starts: Tensor, decoding: bool) -> Tensor:
        if decoding:
            row = torch.arange(before.shape[0], device=before.device)
        else:
            row, before = new_tokens(before, starts)
        return subpages.slots(layout, tables, before, row, self._block_size)

    def _file(self, device: torch.device) -> Layout:
        if self._filed is None:
            empty = torch.zeros(self._blocks, self._layers, dtype=torch.int64, device=device)
            self._filed = Layout(empty[..., None].repeat(1, 1, self._kv_heads), empty, empty.clone(), empty.clone())
            self._tokens = torch.zeros(self._blocks, dtype=torch.int64, device=device)
        return self._filed


def new_tokens(
    before: Int[Tensor, " rows"], starts: Int[Tensor, " rows_plus_1"]
) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]]:
    """Row and position of each of a step's new tokens."""
    row = torch.repeat_interleave(starts.diff())
    return row, torch.arange(row.shape[0], device=row.device) - starts[row] + before[row]


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
