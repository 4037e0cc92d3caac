"""Contexts: compressed prompts out of files, whose pages any number of requests begin with and none writes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.errors import UnsupportedEngineError
from keepset.kernels import subpages
from keepset.kernels.subpages import Group, Layout
from keepset.paged.step import ScheduledRequest, StepBatch


@dataclass(frozen=True)
class ContextPlacement:
    """Which logical blocks of a request hold the context that it begins with.

    Attributes:
        tokens: of the context, kept or not.
        first: leading blocks, which hold nothing.
        own: the first block that is the request's own; those in between are the same for all, their pages any layer's.
    """

    tokens: int
    first: int
    own: int

    @classmethod
    def of(cls, counts: Int[Tensor, "layers kv_heads"], tokens: int, block_size: int, ranks: int) -> ContextPlacement:
        """The same in all layers and on all ranks, each of which holds an equal part of the heads.

        Args:
            counts: entries of every head.
            tokens: of the context.
            block_size: tokens of a block.
            ranks: processes that divide the heads among themselves.

        Raises:
            UnsupportedEngineError: the entries need more blocks than the tokens have.
        """
        parts = counts.unflatten(1, (ranks, -1))
        own = subpages.own_block(counts, tokens, block_size)
        shared = subpages.shareable_pages(parts, block_size).sum((0, 2)).max()  # of one rank
        first = own - -(-int(shared) // parts[:, 0].numel())
        if first < 0:
            raise UnsupportedEngineError(
                f"Of {tokens} tokens of the context nearly all are held, and not by every head: such pages cannot be "
                "shared; build it with a recipe that drops more."
            )
        return cls(tokens, first, own)

    def layout(self, counts: Int[Tensor, "layers kv_heads"], block_size: int) -> Layout:
        """What the pages of a request follow from, as the only row, on one rank with its part of the heads."""
        pages = subpages.shareable_pages(counts, block_size).sum(-1)
        before = self.first * counts.numel() + pages.cumsum(0) - pages
        length, own = (torch.full_like(pages, number)[None] for number in (self.tokens, self.own))
        return Layout(counts[None], length, own, (before + 1)[None])


def context_slots(
    layout: Layout, block_table: Int[Tensor, " width"], block_size: int, blocks: int, own: int | None = None
) -> list[tuple[Int[Tensor, " n"], Int[Tensor, " n"]]]:
    """Of each layer which entries, packed head after head, go to which slots.

    Args:
        layout: as `ContextPlacement.layout` says it.
        block_table: the request's blocks, by logical position.
        block_size: tokens of a block.
        blocks: of every layer's cache.
        own: only what goes to this logical block and those after it; None: all.
    """
    counts = layout.counts[0]
    most = -(-int(counts.max()) // block_size)
    group = Group(range(len(counts)), len(counts), blocks)
    tables = subpages.tables(layout, layout.counts, block_table[None], block_size, most, group)[0].long()
    shared = subpages.shareable_pages(counts, block_size) * block_size
    places = []
    for table, sizes, skipped in zip(tables, counts, shared, strict=True):
        head = torch.arange(len(sizes)).repeat_interleave(sizes)
        entry = torch.arange(len(head)) - (sizes.cumsum(0) - sizes)[head]
        slots = table[head, entry // block_size] * block_size + entry % block_size
        chosen = torch.arange(len(head)) if own is None else (entry >= skipped[head]).nonzero()[:, 0]
        places.append((chosen, slots[chosen]))
    return places


class ContextRequests:
    """Which of a step's requests began with a context, filed under the page that holds a request's newest token.

    No other request writes there, and who comes to write there later drops what is left: see `PerHeadTables`.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tokens: dict[int, int] = {}

    def begin(self, page: int, tokens: int) -> None:
        """The request whose newest token is in this page goes on after a context of so many tokens."""
        self._tokens[page] = tokens

    def marked(self, batch: StepBatch) -> Sequence[ScheduledRequest]:
        """The step's requests, with those that began with a context named; and where they will be after it."""
        if not self._tokens:
            return batch.requests
        size = self._block_size
        columns = [[max(tokens - 1, 0) // size for tokens in (each.before, each.after)] for each in batch.requests]
        rows = batch.tensor([request.row for request in batch.requests])
        pages = batch.block_table[rows[:, None], batch.tensor(columns)].tolist()
        requests = []
        for request, (old, new) in zip(batch.requests, pages, strict=True):
            began = request.before > 0 and self._tokens.get(old) == request.before
            self._tokens.pop(old, None)
            self._tokens.pop(new, None)
            if began:
                self._tokens[new] = request.after
            requests.append(replace(request, after_context=began))
        return requests
