"""Heads that keep different numbers of entries: where their pages are, and as requests of their own on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.keep_set import LazyHostInts
from keepset.kernels import page_layout
from keepset.kernels.dispatch import AsyncHostCopy
from keepset.kernels.page_layout import EntriesInPages, FiledLayouts, PagedTokens, PageGroup, PageLayout
from keepset.paged.block_tables import BlockTables
from keepset.paged.courses import StepCourses
from keepset.paged.engine import EngineSize
from keepset.paged.eviction import EventPages, EvictionSchedule, OccupiedPages, PageAssignment
from keepset.paged.layout_table import EmptiedBlocks, LayoutTable
from keepset.paged.step import RaggedStep, ScheduledRequest, ShiftedBatch, StepBatch, StepPlan

_NO_SLOT = -1
"""A slot that nothing is written to: engines pad their steps with it."""


class RaggedPages:
    """The pages of some requests whose heads have different numbers of entries.

    The copy of the heads' sizes to the host begins at once. The host waits for it when somebody asks for a size.

    Args:
        entries: where the entries lie.
        group: the layers.
        block_size: tokens per page.

    Attributes:
        entries: as given.
    """

    def __init__(self, entries: EntriesInPages, group: PageGroup, block_size: int) -> None:
        self.entries, self._group, self._block_size = entries, group, block_size
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

    def _largest(self, layer_indices: range) -> int:
        return max(max(self._sizes[0][layer_index]) for layer_index in layer_indices)

    def held(self, layer_indices: range) -> Sequence[int]:
        """Return the number of entries of each request in each layer, layer after layer."""
        return [entries for layer_index in layer_indices for entries in self._sizes[1][layer_index]]

    def occupied(self, layer_indices: range) -> OccupiedPages:
        """Return where the entries lie in these layers."""
        layer_entries = self.entries.of_layers(layer_indices)
        entries = page_layout.entries(layer_entries.layout, layer_entries.lengths)
        pages = -(-self._largest(layer_indices) // self._block_size)
        group = self._group._replace(places=layer_indices)
        tables = page_layout.tables(
            layer_entries.layout, entries, layer_entries.block_table, self._block_size, pages, group
        )
        tables = page_layout.to_group_pages(tables.transpose(0, 1), group, entries.shape[-1])
        parts = tables, layer_entries.packed.transpose(0, 1), entries.transpose(0, 1)
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
        moved: the block tables and lengths that the requests have afterwards; None if they stay the same.
    """

    def __init__(
        self,
        entries: EntriesInPages,
        group: PageGroup,
        block_size: int,
        filed: FiledLayouts,
        pages: Int[Tensor, " rows"],
        first: Int[Tensor, " rows"] | None,
        moved: tuple[Int[Tensor, "rows width"], Int[Tensor, " rows"]] | None = None,
    ) -> None:
        super().__init__(entries, group, block_size)
        self._filed, self._pages, self._first = filed.layout, pages, first
        self._moved = moved

    def assign(self, layer_indices: range, counts: Int[Tensor, "layers_rows kv_heads"]) -> PageAssignment:
        size, layers = self._block_size, slice(layer_indices.start, layer_indices.stop)
        table, ends = (self.entries.block_table, self.entries.lengths) if self._moved is None else self._moved
        counts = counts.unflatten(0, (len(layer_indices), -1)).transpose(0, 1)
        lengths = ends[:, None].expand(counts.shape[:2])
        last = -(-lengths // size) - page_layout.blocks_needed(counts, lengths, size)
        first = last if self._first is None else self._first[:, None].expand_as(last)
        fits = first <= last
        if self._moved is None:  # else the scheduler has seen to it that all fits
            fits &= first >= self.entries.layout.first[:, layers]
        counts = counts.where(fits[..., None], 0)

        def take(most: int) -> Tensor:
            layout = PageLayout(counts, lengths, first, torch.zeros_like(first))
            for part, values in zip(self._filed, layout, strict=True):
                in_layers = part[:, layers]
                fit = fits.view(*fits.shape, *[1] * (values.ndim - 2))
                in_layers[self._pages] = values.to(part.dtype).where(fit, in_layers[self._pages])
            group = self._group._replace(places=layer_indices)
            tables = page_layout.tables(layout, counts, table, size, -(-most // size)).transpose(0, 1)
            return page_layout.to_group_pages(tables, group, counts.shape[-1]).flatten(0, 1)

        return PageAssignment(LazyHostInts(fits.t().long()), take)


class RaggedHeadTables(BlockTables):
    """Layouts from step to step, in tensors that stay in place. The engine's block table is used as it is."""

    step: RaggedStep
    """The step that was placed last."""

    def __init__(
        self, schedule: EvictionSchedule, group: PageGroup, size: EngineSize, emptied_blocks: EmptiedBlocks
    ) -> None:
        super().__init__(schedule)
        self._group, self._size, self._emptied_blocks = group, size, emptied_blocks
        self._table = LayoutTable(group.layers, schedule.kv_heads, schedule.block_size, size)
        self._rows: PageLayout | None = None
        self._is_steady = False
        # Of requests between turns: others that come to their pages file layouts of their own there.
        self._between_turns: dict[int, PageLayout] = {}

    def begin(self, page: int, layout: PageLayout) -> None:
        """File the layout of one request under the page that holds its newest token.

        Args:
            page: the page.
            layout: the layout, as its only row.
        """
        self._table.file(page, layout)
        self._is_steady = False

    def place_step(self, batch: StepBatch, courses: StepCourses, plan: StepPlan, eventful: bool) -> None:
        if not batch.requests:
            if self._size.replays and batch.max_query_len == 1:
                filled, width = batch.block_table.shape
                plan.ragged = self._captured(self._each_row(batch, filled, width * self.schedule.block_size))
            return
        rows, compressed = batch.rows, courses.compressed
        tokens, has_others = self._tokens(batch, compressed)
        before, after, required = batch.tensor(np.stack((rows.before, rows.after, compressed))).unbind()
        table, needed = batch.block_table[: len(rows)], eventful or plan.reads_entries
        step = self.follow(table, before, after, required, tokens, has_others, eventful, needed)
        if step is not None and step.tokens is not None:
            plan.ragged = step
            if has_others:
                self._hide(batch, plan, step.tokens, compressed)

    def follow(
        self,
        block_table: Int[Tensor, "rows width"],
        before: Int[Tensor, " rows"],
        after: Int[Tensor, " rows"],
        compressed: Int[Tensor, " rows"],
        tokens: PagedTokens | None,
        has_others: bool,
        eventful: bool,
        needed: bool,
    ) -> RaggedStep | None:
        """Move the layouts of a step's requests to the pages of their newest tokens.

        Args:
            block_table: the engine's block table.
            before: tokens of each request before the step.
            after: tokens of each request after the step.
            compressed: 1 for requests that were compressed before: they must have a layout.
            tokens: the tokens that are written and attended by the layouts; None if there are none.
            has_others: whether there are other tokens.
            eventful: whether an event follows the step.
            needed: whether the layouts are needed even without such tokens.

        Returns:
            The step; None if the engine's own tables are right for all tokens.

        Raises:
            RuntimeError: a compressed request is not where it was left.
        """
        device = block_table.device
        is_steady = tokens is not None and tokens.rows is None and not eventful
        # On a GPU a comparison would take longer than moving again.
        if device.type == "cpu" and is_steady and self._goes_on(block_table, before, after):
            self._table.filed.tokens[self.step.pages] = after.int()
            self.step = replace(self.step, lengths=after, tokens=tokens)
            return self.step
        room = self._room(len(before), device)
        pages = self._table.move(block_table, before, after, compressed, room)
        self._is_steady = is_steady
        if tokens is None and not needed:
            return None
        layout = PageLayout(*(part[: len(before)] for part in room))
        self.step = RaggedStep(pages, after, layout, self.schedule.block_size, self._group, tokens, has_others)
        return self.step

    def entries(self, batch: StepBatch, requests: Sequence[ScheduledRequest]) -> Callable[[], EntriesInPages]:
        rows, longest = batch.tensor([request.row for request in requests]), max(request.after for request in requests)
        # The engine's table may change before the function is called, so its present rows are copied.
        return cache(partial(self._entries, rows, batch.block_table[rows], longest))

    def event_width(self, request: ScheduledRequest) -> int:
        return request.after

    def event_key(self, request: ScheduledRequest) -> Hashable:
        return None

    def event_pages(self, batch: StepBatch, requests: Sequence[ScheduledRequest]) -> RaggedEventPages:
        rows, first = batch.tensor([request.row for request in requests]), None
        pages = self.step.pages[rows]
        if self.schedule_of(requests[0]).fixed:
            first = batch.tensor(
                [self.schedule_of(request).freed(request.prompt, request.after) for request in requests]
            )
        else:
            self._emptied_blocks.add(self._table, pages)
        longest = max(request.after for request in requests)
        return self.pages_of(rows, batch.block_table[rows], longest, first)

    def pages_of(
        self,
        rows: Int[Tensor, " rows"],
        block_table: Int[Tensor, "rows width"],
        longest: int,
        first: Int[Tensor, " rows"] | None,
    ) -> RaggedEventPages:
        """Return the pages of some requests of the step that was placed last.

        Args:
            rows: the requests, by their rows of the batch.
            block_table: their block tables.
            longest: tokens of the longest of them.
            first: as for `RaggedEventPages`.
        """
        entries, size = self._entries(rows, block_table, longest), self.schedule.block_size
        return RaggedEventPages(entries, self._group, size, self._table.filed, self.step.pages[rows], first)

    def export_request(self, blocks: Sequence[int], length: int) -> RaggedPages:
        """Return where the entries of an ended request lie, after its last event.

        Args:
            blocks: the blocks of the request, by logical position.
            length: tokens of the request.

        Raises:
            RuntimeError: the request is not known any more.
        """
        layout = self._table.at(blocks[(length - 1) // self.schedule.block_size], length)
        table, lengths = (
            torch.tensor(numbers, dtype=torch.long, device=layout.counts.device) for numbers in ([blocks], [length])
        )
        entries = EntriesInPages(layout, table, lengths, layout.counts, length)
        return RaggedPages(entries, self._group, self.schedule.block_size)

    def ended_pages(self, left: Sequence[int], tokens: int, blocks: Sequence[int], length: int) -> RaggedEventPages:
        """Return the pages of a request that has ended, for an event after which another one goes on in them.

        Args:
            left: the blocks that it has left, by logical position.
            tokens: tokens of the request.
            blocks: the blocks of the request that goes on.
            length: the tokens that it goes on from.

        Raises:
            RuntimeError: the request is not known any more.
        """
        page = left[(tokens - 1) // self.schedule.block_size]
        layout = self._between_turns[page] = self._table.at(page, tokens)
        return self._pages_from(layout, left, tokens, blocks, length)

    def _pages_from(
        self, layout: PageLayout, left: Sequence[int], tokens: int, blocks: Sequence[int], length: int
    ) -> RaggedEventPages:
        """Return the pages of some entries, for an event after which a request goes on with them.

        Args:
            layout: where the entries lie.
            left: their blocks, by logical position.
            tokens: how many tokens they are of.
            blocks: the blocks of the request.
            length: the tokens that it goes on from.
        """
        size = self.schedule.block_size
        ended, next_table, lengths, next_lengths, page = (
            torch.tensor(numbers, dtype=torch.long, device=layout.counts.device)
            for numbers in ([left], [blocks], [tokens], [length], [blocks[(length - 1) // size]])
        )
        entries = EntriesInPages(layout, ended, lengths, layout.counts, tokens)
        return RaggedEventPages(entries, self._group, size, self._table.filed, page, None, (next_table, next_lengths))

    def copied_pages(
        self, source: Sequence[int], newest: tuple[int, int] | None, blocks: Sequence[int], length: int
    ) -> RaggedEventPages:
        """Return the pages of a request's first tokens, for an event after which another one goes on with a copy.

        Args:
            source: the blocks of the tokens, by logical position.
            newest: the page of the request's newest token, and its tokens; None if nothing was dropped yet.
            blocks: the blocks of the request that goes on.
            length: the tokens that it goes on from.

        Raises:
            RuntimeError: the request is not known any more, or has dropped some since.
        """
        filed = self._table.filed
        page, tokens = newest or (0, 0)
        layout = PageLayout(*(part[page][None].long() for part in filed.layout))
        if newest is None:
            layout = PageLayout(*(torch.zeros_like(part) for part in layout))
        elif filed.tokens[page] != tokens or bool((layout.length > length).any()):
            raise RuntimeError("a turn that goes on with the same conversation has dropped some of it.")
        return self._pages_from(layout, source, length, blocks, length)

    def go_on(self, page: int, tokens: int) -> int:
        """Note that a request goes on from so many tokens; return how many of its leading blocks no layer uses.

        Args:
            page: the page that holds its newest token, under which its layout is filed.
            tokens: tokens of the request.
        """
        self._table.filed.tokens[page] = tokens
        self._is_steady = False
        layout = self._between_turns[page] = self._table.at(page, tokens)
        return int(layout.first.amin())

    def between_turns(self, page: int) -> PageLayout:
        """Return the layout of a conversation that waits for its next turn, as its only row.

        Args:
            page: the page that holds its newest token.

        Raises:
            KeyError: none has waited there.
        """
        return self._between_turns[page]

    def _entries(
        self, rows: Int[Tensor, " rows"], block_table: Int[Tensor, "rows width"], longest: int
    ) -> EntriesInPages:
        layout = PageLayout(*(part[rows] for part in self.step.layout))
        return EntriesInPages(layout, block_table, self.step.lengths[rows], layout.counts, longest)

    def _captured(self, tokens: PagedTokens) -> RaggedStep:
        """Return the step that a graph captures: later steps have their layouts at the same addresses."""
        rows = len(tokens.lengths)
        layout = PageLayout(*(part[:rows] for part in self._room(rows, tokens.lengths.device)))
        pages = torch.zeros_like(tokens.lengths)
        return RaggedStep(pages, tokens.lengths, layout, self.schedule.block_size, self._group, tokens, others=False)

    def _room(self, rows: int, device: torch.device) -> PageLayout:
        """Return the tensors for the layouts of a step's requests, which are the same in every step.

        Args:
            rows: the least number of requests that must fit.
            device: the device of the tensors.
        """
        if self._rows is None or len(self._rows.length) < rows:
            most = max(rows, self._size.max_requests)
            self._rows = FiledLayouts.empty(most, self._group.layers, self.schedule.kv_heads, device).layout
        return self._rows

    def _goes_on(
        self, block_table: Int[Tensor, "rows width"], before: Int[Tensor, " rows"], after: Int[Tensor, " rows"]
    ) -> bool:
        """Return whether the same requests ran in the step before and none has a new block, so that layouts stay.

        Args:
            block_table: blocks of every request, by logical position.
            before: tokens of every request before the step.
            after: tokens of every request after the step.
        """
        if not self._is_steady or len(before) != len(self.step.pages):
            return False
        rows = torch.arange(len(before))
        old, new = (block_table[rows, (tokens - 1) // self.schedule.block_size] for tokens in (before, after))
        return bool(((old == new) & (new == self.step.pages) & (before == self.step.lengths)).all())

    def _tokens(self, batch: StepBatch, compressed: np.ndarray) -> tuple[PagedTokens | None, bool]:
        """Return the tokens that are written and attended to by the layout, and whether there are others.

        Args:
            batch: the step.
            compressed: for every request of the step, whether it was compressed.

        Returns:
            The tokens, None if there are none; and whether the engine's kernel has tokens to attend to.
        """
        rows, any_compressed = batch.rows, bool(compressed.any())
        new, longest = rows.end_query - rows.first_query, int(rows.after.max())
        if (any_compressed or self._size.replays) and (new == 1).all():
            return self._each_row(batch, len(rows), longest), False
        if not any_compressed:
            return None, True
        request = np.repeat(np.arange(len(rows)), new * compressed)
        nth = np.arange(len(request)) - np.repeat(np.cumsum(new * compressed) - new * compressed, new * compressed)
        several = rows.first_query[request] + nth, rows.row[request], rows.before[request] + nth + 1
        token_indices, at, lengths = batch.tensor(np.stack(several)).unbind()
        return PagedTokens(batch.block_table, lengths, longest, token_indices, at), not compressed.all()

    def _each_row(self, batch: StepBatch, rows: int, longest: int) -> PagedTokens:
        """Return one token of each of the first rows.

        Args:
            batch: the step.
            rows: the number of requests.
            longest: tokens of the longest of them.
        """
        return PagedTokens(batch.block_table, batch.seq_lens[:rows], longest, slots=batch.slot_mapping[:rows])

    def _hide(self, batch: StepBatch, plan: StepPlan, tokens: PagedTokens, compressed: np.ndarray) -> None:
        """Mask these tokens' slots for the engine, and shorten their lengths for its kernel, which cannot skip them.

        Args:
            batch: the step, whose slots are changed.
            plan: its plan, which gets the shorter lengths.
            tokens: the tokens of compressed requests.
            compressed: for every request of the step, whether it is one of these.
        """
        assert tokens.places is not None
        batch.slot_mapping.index_fill_(0, tokens.places, _NO_SLOT)
        rows, dropped = batch.rows, np.zeros(len(batch.block_table), dtype=np.int64)
        dropped[rows.row] = rows.before * compressed
        lengths = batch.seq_lens - batch.tensor(dropped).to(batch.seq_lens)
        longest = int((rows.after - dropped[rows.row]).max())
        plan.shifted = ShiftedBatch(batch.block_table, lengths, longest, dropped)


class PerHeadBatch(NamedTuple):
    """One layer's tokens. Each KV head of each token is a request of its own, with one KV head and one query.

    Attributes:
        seq_lens: entries of each request.
        block_table: sub-pages of each, numbered through the caches of all layers that share the engine's block table.
        query_start_loc: the first query of each, and the end of the last one's.
        slot_mapping: the slot of each new entry in these sub-pages.
    """

    seq_lens: Int[Tensor, " tokens_heads"]
    block_table: Int[Tensor, "tokens_heads pages"]
    query_start_loc: Int[Tensor, " tokens_heads_plus_1"]
    slot_mapping: Int[Tensor, " tokens_heads"]


class PerHeadSequences:
    """The `PerHeadBatch` of every layer of a group, made for all of them at once."""

    def __init__(self, step: RaggedStep) -> None:
        tokens = step.tokens
        assert tokens is not None
        self._places = tokens.places
        rows, lengths = tokens.rows, tokens.lengths.long()
        layout = step.layout if rows is None else PageLayout(*(part[rows] for part in step.layout))
        entries, size = page_layout.entries(layout, lengths), step.block_size
        if step.tables is None:
            # Tables reach as far as a request's newest block: until that is full, no other is needed.
            coming = entries + (-lengths % size)[:, None, None]
            blocks = tokens.block_table[: len(lengths)] if rows is None else tokens.block_table[rows]
            step.tables = page_layout.tables(layout, coming, blocks, size, -(-int(coming.max()) // size), step.group)
        n, layers, heads, pages = step.tables.shape
        self._tokens, self._kv_heads = n, heads
        before = torch.arange(layers, device=lengths.device)[:, None] * (step.group.blocks * heads)
        every = torch.arange(n, device=lengths.device)
        slots = page_layout.slots(layout, step.tables, lengths - 1, every, size)
        starts = torch.arange(n * heads + 1, device=lengths.device, dtype=torch.int32)
        # Contiguous, because kernels read them by address; with a single head the transposed ones would not be.
        slots = (slots + before * size).contiguous()
        tables = step.tables.transpose(0, 1).reshape(layers, n * heads, pages)
        tables = ((tables + before[..., None]) % (layers * step.group.blocks * heads)).int().contiguous()
        lengths = entries.transpose(0, 1).reshape(layers, -1).int().contiguous()
        self._batches = [
            PerHeadBatch(seq_lens, table, starts, layer_slots)
            for seq_lens, table, layer_slots in zip(lengths, tables, slots, strict=True)
        ]

    def batch(self, layer_index: int) -> PerHeadBatch:
        """Return the batch of the layer at this place of the group."""
        return self._batches[layer_index]

    def split(self, rows: Float[Tensor, "n heads dim"]) -> Float[Tensor, "tokens_heads group dim"]:
        """Return queries, keys or values of the step as those of the heads' requests."""
        token_rows = rows[: self._tokens] if self._places is None else rows[self._places]
        return token_rows.reshape(self._tokens * self._kv_heads, -1, token_rows.shape[-1])

    def output_buffer(self, output: Float[Tensor, "n query_heads dim"]) -> Float[Tensor, "tokens_heads group dim"]:
        """Return a tensor for the attention of the heads' requests: a view of the step's output if possible."""
        if self._places is None:
            return self.split(output)
        return output.new_empty(self._tokens * self._kv_heads, output.shape[1] // self._kv_heads, output.shape[2])

    def merge(
        self, attended: Float[Tensor, "tokens_heads group dim"], output: Float[Tensor, "n query_heads dim"]
    ) -> None:
        """Write the attention of the heads' requests to its places in the step's output, unless it is a view of that.

        Args:
            attended: the attention of the heads' requests.
            output: the tensor for the step's attention.
        """
        if self._places is not None:
            output[self._places] = attended.view(-1, *output.shape[1:])
