"""Page tables of requests whose heads keep different numbers of entries, in closed form.

The engine gives a request blocks. A block is one sub-page for each KV head. After an event the heads no longer advance
together, so the request's sub-pages are numbered block after block and assigned anew:

- at the event, head after head takes the pages that its kept entries fill;
- after the event, a head takes the next page whenever its last one is full. Every head gets one entry for each token,
  so it takes one page for every `block_size` tokens. Heads always take pages in the order in which they first run full.

So the number of any page follows from the counts at the newest event. Nothing is stored for a page, and nothing moves
between events. A request without an event has zeros as its layout, which give the engine's own: page `i` of head `h` is
number `i * kv_heads + h`. Compressed and other requests therefore share one call.

Pages that several requests share are assigned in another way, because no request may write to them. All full pages come
first, through all layers that share the block table, up to a block's end; a layer with few entries lends pages to one
with many. Then comes the last page of every head, head after head, in the first block that is the request's own.

So a page of one layer may lie in the cache of another. The numbers of a layer's sub-pages go on into the caches of the
layers that follow in its group, and after the last layer into the first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class PageLayout(NamedTuple):
    """The newest event of requests, layer by layer, from which their pages follow. All zero: no event yet.

    Attributes:
        counts: entries of each head right after the event: those that it kept, and those that came after it in its
            step.
        length: tokens of the request at that time.
        first: the first logical block that belongs to this layer's heads alone.
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

    A layout of one layer, and its entries, may stand for all layers of a `group`.

    Args:
        pages: how many places to make for each head: at least what the head with most entries needs.
        group: layers to make tables for; None: the layers of the layout.

    Returns:
        0 at the places that a head does not need, for which nothing is looked up. Without a `group` shared pages are 0,
        too.
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
    # Before the lookup: a place that no head needs may point outside the block table.
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

    It is enough to look at the moment when the request's newest block is full, `tail` tokens from now. Until then no
    block is added and pages are only taken. From then on, every `block_size` tokens bring one block, which is one
    sub-page for each head, and take one page for each head.
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
        tables: sub-pages of each head, which must reach as far as the new entries.
        positions: number of each token in its request; it came after the newest event.
    """
    entry = entries(PageLayout(*(part[rows] for part in layout)), positions)
    _, layers, kv_heads, pages = tables.shape
    head = torch.arange(layers * kv_heads, device=rows.device).view(layers, kv_heads)
    place = (rows[:, None, None] * (layers * kv_heads) + head) * pages + entry // block_size
    found = tables.flatten().index_select(0, place.flatten()).long().view_as(entry) * block_size + entry % block_size
    return found.transpose(0, 1).flatten(1)


def own_block(counts: Int[Tensor, "*rows kv_heads"], length: int, block_size: int) -> int:
    """Return the first logical block that is a request's own if it goes on after `length` tokens with shared pages.

    It is the last block. It is the block before if some head's last page runs full earlier: the block with that head's
    next page must exist by then.
    """
    last, filled = (length - 1) // block_size, (length - 1) % block_size + 1
    return last - int(bool(((counts - 1) % block_size >= filled).any()))


def shareable_pages(counts: Int[Tensor, "*rows kv_heads"], block_size: int) -> Int[Tensor, "*rows kv_heads"]:
    """Return how many pages of each head can be shared: the full ones but for the last, in which the head goes on."""
    return (_ceil_div(counts, block_size) - 1).clamp(min=0)


def _numbers(
    layout: PageLayout, page: Int[Tensor, " pages"], block_size: int
) -> tuple[Int[Tensor, "rows layers kv_heads pages"], Bool[Tensor, "rows layers kv_heads pages"]]:
    """Return each page's number among its request's sub-pages, and whether it was packed at the event.

    Pages that were packed at the event follow one another; later pages are `kv_heads` apart. Numbers count from block
    `first` on. Shared pages are numbered from the layer's first shared page on.
    """
    counts, shared = layout.counts, layout.shared[..., None] > 0
    kv_heads = counts.shape[-1]
    kept = torch.where(shared, shareable_pages(counts, block_size), _ceil_div(counts, block_size))
    end = kept.cumsum(-1)
    # Heads with fewer free places run full earlier; if equal, the lower head takes its page first.
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
