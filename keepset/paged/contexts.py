"""Contexts: compressed prompts from files. Any number of requests share a context's pages; none writes to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.errors import UnsupportedEngineError
from keepset.kernels import page_layout
from keepset.kernels.page_layout import PageGroup, PageLayout


@dataclass(frozen=True)
class ContextPlacement:
    """The logical blocks of a request that hold the context that it begins with.

    Attributes:
        tokens: tokens of the context, kept or not.
        first: the number of leading blocks, which hold nothing.
        own: the first block that is the request's own. Blocks from `first` to `own` are shared by all requests with
            this context, and their pages may belong to any layer.
        shared: whether blocks are shared. If not, a request has its own copy of all pages, because it compresses them.
    """

    tokens: int
    first: int
    own: int
    shared: bool

    @classmethod
    def of(
        cls, counts: Int[Tensor, "layers kv_heads"], tokens: int, block_size: int, ranks: int, shared: bool
    ) -> ContextPlacement:
        """Return the placement of a context, the same in all layers and on all ranks.

        Args:
            counts: entries of every head.
            tokens: tokens of the context.
            block_size: tokens per block.
            ranks: the number of processes, each of which holds an equal part of the heads.
            shared: whether blocks are shared.

        Raises:
            UnsupportedEngineError: the entries need more blocks than the tokens have.
        """
        parts = counts.unflatten(1, (ranks, -1))
        if shared:
            own_block = page_layout.own_block(counts, tokens, block_size)
            pages = page_layout.shareable_pages(parts, block_size).sum((0, 2)).max()  # of one rank
            first = own_block - -(-int(pages) // parts[:, 0].numel())
        else:
            own_block = first = int(_first_block(parts, tokens, block_size).min())
        if first < 0:
            raise UnsupportedEngineError(
                f"Of {tokens} tokens of the context nearly all are held, and not by every head: such pages cannot be "
                "shared; build it with a recipe that drops more."
            )
        return cls(tokens, first, own_block, shared)

    def layout(self, counts: Int[Tensor, "layers kv_heads"], block_size: int) -> PageLayout:
        """Return the layout of a request's pages on one rank, as the only row.

        Args:
            counts: entries of every head of this rank.
            block_size: tokens per block.
        """
        if not self.shared:
            first = _first_block(counts, self.tokens, block_size)
            return PageLayout(
                counts[None], torch.full_like(first, self.tokens)[None], first[None], torch.zeros_like(first)[None]
            )
        pages = page_layout.shareable_pages(counts, block_size).sum(-1)
        before = self.first * counts.numel() + pages.cumsum(0) - pages
        length, own_blocks = (torch.full_like(pages, number)[None] for number in (self.tokens, self.own))
        return PageLayout(counts[None], length, own_blocks, (before + 1)[None])


def _first_block(counts: Int[Tensor, "*rows kv_heads"], tokens: int, block_size: int) -> Int[Tensor, "*rows"]:
    """Return the first of the request's last blocks, which hold the entries if each head has its own pages.

    Args:
        counts: entries of every head.
        tokens: tokens of the request.
        block_size: tokens per block.
    """
    lengths = torch.full(counts.shape[:-1], tokens, dtype=torch.long)
    return -(-lengths // block_size) - page_layout.blocks_needed(counts, lengths, block_size)


def context_places(
    layout: PageLayout, block_table: Int[Tensor, " width"], block_size: int, blocks: int, unshared: bool = False
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Return where the entries of a context go, which are packed layer after layer and head after head.

    Args:
        layout: the request's layout, as `ContextPlacement.layout` returns it.
        block_table: the request's blocks, by logical position.
        block_size: tokens per block.
        blocks: blocks of every layer's cache.
        unshared: whether only entries in the request's own pages are chosen.

    Returns:
        Which of all entries are chosen, and the layer and the slot of each. Slots go on into the caches of the layers
        that follow, as sub-pages do.
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
    if unshared:
        chosen = (entry >= (page_layout.shareable_pages(sizes, block_size) * block_size)[head]).nonzero()[:, 0]
        head, entry = head[chosen], entry[chosen]
    slots = tables.flatten(1, 2)[0].long()[head, entry // block_size] * block_size + entry % block_size
    return chosen, head // kv_heads, slots
