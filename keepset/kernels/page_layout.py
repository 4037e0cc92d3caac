"""Page tables of requests whose heads keep different numbers of entries, in closed form.

The engine gives a request blocks. A block has one sub-page for each KV head. After an event the heads' lengths differ,
so the request's sub-pages are numbered block after block and assigned anew:

- at the event, head after head takes the pages that its kept entries fill;
- after the event, a head takes the next page whenever its last one is full. Every head gets one entry for each token,
  so it takes one page for every `block_size` tokens. Heads always take pages in the order in which they first fill up.

So the number of any page follows from the counts at the newest event. Nothing is stored for a page, and nothing moves
between events. A request without an event has a layout of zeros, which is the engine's own: page `i` of head `h` is
number `i * kv_heads + h`. Compressed and other requests therefore share one call.

Pages that several requests share are assigned differently, because no request may write to them. All full pages come
first, through all layers that share the block table, up to a block's end; a layer with few entries lends pages to one
with many. Then comes the last page of every head, head after head, in the request's first private block.

So a page of one layer may lie in the cache of another. A layer's sub-page numbers continue into the caches of the
following layers of its group, and from the last layer into the first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class PageLayout(NamedTuple):
    """The newest event of requests, layer by layer, which determines their pages. All zero: no event yet.

    Attributes:
        counts: entries of each head after the step of the event: those that it kept, and those of later tokens.
        length: tokens of the request at that time.
        first: the first logical block that is private to this layer's heads.
        shared: 0 if no page is shared. Else one more than the number of the layer's first shared page, counted from the
            request's first block through the pages of all layers.
    """

    counts: Int[Tensor, "rows layers kv_heads"]
    length: Int[Tensor, "rows layers"]
    first: Int[Tensor, "rows layers"]
    shared: Int[Tensor, "rows layers"]


class PageGroup(NamedTuple):
    """Layers among those that share a block table.

    Attributes:
        places: indices of these layers.
        layers: how many layers share the block table.
        blocks: blocks of each layer's cache.
    """

    places: range
    layers: int
    blocks: int


def entries(layout: PageLayout, lengths: Int[Tensor, " rows"]) -> Int[Tensor, "rows layers kv_heads"]:
    """Return the entries of every head when its request has `lengths` tokens: `counts + lengths - length`."""
    return layout.counts + (lengths[:, None] - layout.length)[..., None]


def tables(
    layout: PageLayout,
    entries: Int[Tensor, "rows _ kv_heads"],
    block_table: Int[Tensor, "rows width"],
    block_size: int,
    pages: int,
    group: PageGroup | None = None,
) -> Int[Tensor, "rows layers kv_heads {pages}"]:
    """Return the sub-pages of every head, in the order of its entries and in the block table's dtype.

    A layout and entries of one layer may stand for all layers of a `group`.

    Args:
        pages: columns for each head: at least as many as the head with most entries has pages.
        group: layers to make tables for; None: the layers of the layout.

    Returns:
        Sub-page numbers; 0 at columns that a head does not need. Without a `group`, shared pages are also 0.
    """
    page = torch.arange(pages, device=block_table.device)
    needed = page < _ceil_div(entries, block_size)[..., None]
    number, packed, kv_heads = *_numbers(layout, page, block_size), entries.shape[-1]
    block = layout.first[..., None, None] + number // kv_heads
    beyond, shared = torch.zeros_like(number), packed & (layout.shared > 0)[..., None, None]
    if group is None:
        needed = needed & ~shared
    else:
        through = layout.shared[..., None, None] - 1 + number
        block = torch.where(shared, through // (group.layers * kv_heads), block)
        places = torch.arange(group.places.start, group.places.stop, device=page.device)[:, None, None]
        others = (through // kv_heads - places) % group.layers
        beyond = (others * group.blocks).where(shared, 0)
        number = torch.where(shared, through, number)
    # Before the lookup, because a column that no head needs may point outside the block table.
    block = block.where(needed, 0)
    found = block_table.gather(1, block.flatten(1).long()).view(block.shape)
    return ((beyond + found) * kv_heads + number % kv_heads).where(needed, 0).to(block_table.dtype)


def to_group_pages(tables: Int[Tensor, "layers *rest"], group: PageGroup, kv_heads: int) -> Int[Tensor, "layers *rest"]:
    """Return sub-pages of each layer of the group, numbered from the group's first layer on."""
    places = torch.arange(group.places.start, group.places.stop, device=tables.device)
    before = (places * (group.blocks * kv_heads)).view(-1, *[1] * (tables.ndim - 1))
    return (tables.long() + before) % (group.layers * group.blocks * kv_heads)


def blocks_needed(
    counts: Int[Tensor, "*rows kv_heads"], length: Int[Tensor, "*rows"], block_size: int
) -> Int[Tensor, "*rows"]:
    """Return how many of a request's last blocks hold its heads, now and at any later length.

    Only the moment when the request's newest block is full, `tail` tokens from now, matters. Until then no block is
    added and pages are only taken. After it, every `block_size` tokens add one block, which has one sub-page for each
    head, and take one page for each head.
    """
    kv_heads = counts.shape[-1]
    tail = -length % block_size
    return _ceil_div(_ceil_div(counts + tail[..., None], block_size).sum(-1), kv_heads)


def slots(
    layout: PageLayout,
    tables: Int[Tensor, "rows layers kv_heads pages"],
    positions: Int[Tensor, " tokens"],
    rows: Int[Tensor, " tokens"],
    block_size: int,
) -> Int[Tensor, "layers new_entries"]:
    """Return the slot of each new token's entry in each layer, in the order of `key.reshape(-1, 1, head_dim)`.

    Args:
        tables: sub-pages of each head, up to the new entries.
        positions: number of each token in its request; all came after the newest event.
    """
    entry = entries(PageLayout(*(part[rows] for part in layout)), positions)
    _, layers, kv_heads, pages = tables.shape
    head = torch.arange(layers * kv_heads, device=rows.device).view(layers, kv_heads)
    place = (rows[:, None, None] * (layers * kv_heads) + head) * pages + entry // block_size
    found = tables.flatten().index_select(0, place.flatten()).long().view_as(entry) * block_size + entry % block_size
    return found.transpose(0, 1).flatten(1)


def own_block(counts: Int[Tensor, "*rows kv_heads"], length: int, block_size: int) -> int:
    """Return the first private logical block of a request that continues after `length` tokens with shared pages.

    It is the last block, or the block before if some head's last page fills up earlier: the block with that head's next
    page must exist by then.
    """
    last, filled = (length - 1) // block_size, (length - 1) % block_size + 1
    return last - int(bool(((counts - 1) % block_size >= filled).any()))


def shareable_pages(counts: Int[Tensor, "*rows kv_heads"], block_size: int) -> Int[Tensor, "*rows kv_heads"]:
    """Return how many pages of each head can be shared: all but the last, to which the head's next entries go."""
    return (_ceil_div(counts, block_size) - 1).clamp(min=0)


def _numbers(
    layout: PageLayout, page: Int[Tensor, " pages"], block_size: int
) -> tuple[Int[Tensor, "rows layers kv_heads pages"], Bool[Tensor, "rows layers kv_heads pages"]]:
    """Return each page's number among its request's sub-pages, and whether it was packed at the event.

    Pages that were packed at the event are consecutive; later pages are `kv_heads` apart. Numbers count from block
    `first`. Shared pages count from the layer's first shared page.
    """
    counts, shared = layout.counts, layout.shared[..., None] > 0
    kv_heads = counts.shape[-1]
    kept = torch.where(shared, shareable_pages(counts, block_size), _ceil_div(counts, block_size))
    end = kept.cumsum(-1)
    # Heads with fewer free places fill up earlier; if equal, the lower head takes its page first.
    heads = torch.arange(kv_heads, device=counts.device)
    free = torch.where(shared, 0, -counts % block_size)
    rank = (free * kv_heads + heads).argsort(-1).argsort(-1)
    # Page `kept` is the first since the event: all packed pages and `rank` pages of other heads precede it.
    later = torch.where(shared, 0, end[..., -1:]) + rank - kept * kv_heads
    start, packed = (end - kept)[..., None] + page, page < kept[..., None]
    return start.where(packed, later[..., None] + page * kv_heads), packed


def _ceil_div(numerator: Int[Tensor, "*shape"], denominator: int) -> Int[Tensor, "*shape"]:
    """Return the quotient, rounded up."""
    return (numerator + denominator - 1) // denominator
