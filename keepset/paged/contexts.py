"""Contexts: compressed prompts out of files, whose pages any number of requests begin with and none writes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.errors import UnsupportedEngineError
from keepset.kernels import page_layout
from keepset.kernels.page_layout import PageGroup, PageLayout


@dataclass(frozen=True)
class ContextPlacement:
    """Which logical blocks of a request hold the context that it begins with.

    Attributes:
        tokens: of the context, kept or not.
        first: leading blocks, which hold nothing.
        own: the first block that is the request's own; those in between are the same for all, their pages any layer's.
        shared: whether there are such; else a request has all pages for itself, because it compresses them further.
    """

    tokens: int
    first: int
    own: int
    shared: bool

    @classmethod
    def of(
        cls, counts: Int[Tensor, "layers kv_heads"], tokens: int, block_size: int, ranks: int, shared: bool
    ) -> ContextPlacement:
        """The same in all layers and on all ranks, each of which holds an equal part of the heads.

        Args:
            counts: entries of every head.
            tokens: of the context.
            block_size: tokens of a block.
            ranks: processes that divide the heads among themselves.
            shared: as the attribute.

        Raises:
            UnsupportedEngineError: the entries need more blocks than the tokens have.
        """
        parts = counts.unflatten(1, (ranks, -1))
        if shared:
            own = page_layout.own_block(counts, tokens, block_size)
            pages = page_layout.shareable_pages(parts, block_size).sum((0, 2)).max()  # of one rank
            first = own - -(-int(pages) // parts[:, 0].numel())
        else:
            own = first = int(_first_block(parts, tokens, block_size).min())
        if first < 0:
            raise UnsupportedEngineError(
                f"Of {tokens} tokens of the context nearly all are held, and not by every head: such pages cannot be "
                "shared; build it with a recipe that drops more."
            )
        return cls(tokens, first, own, shared)

    def layout(self, counts: Int[Tensor, "layers kv_heads"], block_size: int) -> PageLayout:
        """What the pages of a request follow from, as the only row, on one rank with its part of the heads."""
        if not self.shared:
            first = _first_block(counts, self.tokens, block_size)
            return PageLayout(
                counts[None], torch.full_like(first, self.tokens)[None], first[None], torch.zeros_like(first)[None]
            )
        pages = page_layout.shareable_pages(counts, block_size).sum(-1)
        before = self.first * counts.numel() + pages.cumsum(0) - pages
        length, own = (torch.full_like(pages, number)[None] for number in (self.tokens, self.own))
        return PageLayout(counts[None], length, own, (before + 1)[None])


def _first_block(counts: Int[Tensor, "*rows kv_heads"], tokens: int, block_size: int) -> Int[Tensor, "*rows"]:
    """The first of a request's last blocks that hold so many entries of heads of their own."""
    lengths = torch.full(counts.shape[:-1], tokens)
    return -(-lengths // block_size) - page_layout.blocks_needed(counts, lengths, block_size)


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
    layout: PageLayout, block_table: Int[Tensor, " width"], block_size: int, blocks: int, own: bool = False
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
    tables = page_layout.tables(
        layout, layout.counts, block_table[None], block_size, most, PageGroup(range(layers), layers, blocks)
    )
    sizes = counts.flatten()
    head = torch.arange(len(sizes)).repeat_interleave(sizes)
    entry = torch.arange(len(head)) - (sizes.cumsum(0) - sizes)[head]
    chosen = torch.arange(len(head))
    if own:
        chosen = (entry >= (page_layout.shareable_pages(sizes, block_size) * block_size)[head]).nonzero()[:, 0]
        head, entry = head[chosen], entry[chosen]
    slots = tables.flatten(1, 2)[0].long()[head, entry // block_size] * block_size + entry % block_size
    return EntryPlaces(chosen, head // kv_heads, slots)
