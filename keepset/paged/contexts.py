"""Contexts: compressed prompts out of files, whose pages any number of requests begin with and none writes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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


class EntryPlaces(NamedTuple):
    """Which entries of a context go where.

    Attributes:
        chosen: of all of them.
        layers, slots: of each that is chosen; slots go on into the caches of the layers that follow, as sub-pages do.
    """

    chosen: Int[Tensor, " n"]
    layers: Int[Tensor, " n"]
    slots: Int[Tensor, " n"]


def context_places(
    layout: Layout, block_table: Int[Tensor, " width"], block_size: int, blocks: int, own: bool = False
) -> EntryPlaces:
    """Where the entries of a context go, packed layer after layer and head after head.

    Args:
        layout: as `ContextPlacement.layout` says it.
        block_table: the request's blocks, by logical position.
        block_size: tokens of a block.
        blocks: of every layer's cache.
        own: only those in pages that are the request's own.
    """
    counts = layout.counts[0]
    layers, kv_heads = counts.shape
    most = -(-int(counts.max()) // block_size)
    tables = subpages.tables(
        layout, layout.counts, block_table[None], block_size, most, Group(range(layers), layers, blocks)
    )
    sizes = counts.flatten()
    head = torch.arange(len(sizes)).repeat_interleave(sizes)
    entry = torch.arange(len(head)) - (sizes.cumsum(0) - sizes)[head]
    chosen = torch.arange(len(head))
    if own:
        chosen = (entry >= (subpages.shareable_pages(sizes, block_size) * block_size)[head]).nonzero()[:, 0]
        head, entry = head[chosen], entry[chosen]
    slots = tables.flatten(1, 2)[0].long()[head, entry // block_size] * block_size + entry % block_size
    return EntryPlaces(chosen, head // kv_heads, slots)


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
