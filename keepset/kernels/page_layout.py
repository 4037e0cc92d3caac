"""Page tables of requests whose heads keep different numbers of entries, in closed form.

vLLM gives a request blocks; a block is one sub-page of each KV head (`keepset.paged.pages`). After a compression
the heads no longer advance together, so the request's sub-pages are numbered through, block after block, and dealt
out anew:

- at the event, head after head takes the pages that its kept entries fill;
- afterwards a head takes the next page whenever it runs full. All heads get one entry per token, so each takes
  exactly one page per `block_size` tokens, and always in the same order: that in which they first run full.

Hence the number of any page follows from the counts at the newest event. Nothing is stored per page, nothing moves
between events, and a request without an event (a state of zeros) has vLLM's own layout: page `i` of head `h` is
number `i * kv_heads + h`. So compressed and plain requests share one call.

What several requests begin with is dealt out otherwise, because none may write to another's pages. All that are full
come first, through all layers that share the block table, up to a block's end: a layer that holds little lends its
pages to one that holds much. Then every head's last one, head after head, in the first block of the request's own.

So a page of a layer may lie in another one's cache. The numbers of a layer's sub-pages go on into the caches of the
layers that follow in its group, and after the last into those of the first ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class PageLayout(NamedTuple):
    """What requests' pages follow from: their newest compression event, layer by layer. All zero: none yet.

    Attributes:
        counts: entries of each head once that event was over: those that it kept, and those behind it in its own step.
        length: the request's tokens at that time.
        first: the first logical block that is dealt out to the layer's heads alone.
        shared: where the pages that are full by then are other requests', too, one more than the number of the layer's
            first, counted from the request's first block on through the pages of all layers; else 0.
    """

    counts: Int[Tensor, "rows layers kv_heads"]
    length: Int[Tensor, "rows layers"]
    first: Int[Tensor, "rows layers"]
    shared: Int[Tensor, "rows layers"]


class PageGroup(NamedTuple):
    """Layers that share a block table.

    Attributes:
        places: of those in question, among all.
        layers: how many share it.
        blocks: of every layer's cache.
    """

    places: range
    layers: int
    blocks: int


def entries(layout: PageLayout, lengths: Int[Tensor, " rows"]) -> Int[Tensor, "rows layers kv_heads"]:
    """Entries of every head when its request has `lengths` tokens.

    What was kept, and one more for each token since the event.
    """
    return layout.counts + (lengths[:, None] - layout.length)[..., None]


def tables(
    layout: PageLayout,
    entries: Int[Tensor, "rows _ kv_heads"],
    block_table: Int[Tensor, "rows width"],
    block_size: int,
    pages: int,
    group: PageGroup | None = None,
) -> Int[Tensor, "rows layers kv_heads {pages}"]:
    """The sub-pages of every head, in the order of its entries and in the block table's dtype.

    A layout of one layer, and its entries, may stand for all of a `group`'s.

    `pages` is how many places to make: as many as the head with most entries needs (any bound above will do).
    Places that a head does not need are 0, and nothing is looked up for them; without a `group` so are those that other
    requests share.
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
    # Before the look-up: what a place beyond the need points at may lie outside the block table.
    block = block.where(needed, 0)
    found = block_table.gather(1, block.flatten(1).long()).view(block.shape)
    return ((beyond + found) * kv_heads + number % kv_heads).where(needed, 0).to(block_table.dtype)


def to_group_pages(tables: Int[Tensor, "layers *rest"], group: PageGroup, kv_heads: int) -> Int[Tensor, "layers *rest"]:
    """Sub-pages of each of the group's layers in question, as they are counted from the group's first layer on."""
    places = torch.arange(group.places.start, group.places.stop, device=tables.device)
    before = (places * (group.blocks * kv_heads)).view(-1, *[1] * (tables.ndim - 1))
    return (tables.long() + before) % (group.layers * group.blocks * kv_heads)


def blocks_needed(
    counts: Int[Tensor, "*rows kv_heads"], length: Int[Tensor, "*rows"], block_size: int
) -> Int[Tensor, "*rows"]:
    """How many of the request's last blocks hold heads of these counts, at `length` tokens and ever after.

    It is enough to look at the moment when the request's newest block is full, `tail` tokens from now: until then
    no block is added and pages are only taken, and from then on each `block_size` tokens bring one block, a
    sub-page for every head, and take one page for every head.
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
    """Where the new tokens' entries go in each layer, in the order of `key.reshape(-1, 1, head_dim)`.

    That is token by token, and of each token head by head. Token `t` is number `positions[t]` of the request in
    row `rows[t]` and came after the newest event, so the head already holds `positions - length + counts` entries.
    The tables must reach as far.
    """
    entry = entries(PageLayout(*(part[rows] for part in layout)), positions)
    _, layers, kv_heads, pages = tables.shape
    head = torch.arange(layers * kv_heads, device=rows.device).view(layers, kv_heads)
    place = (rows[:, None, None] * (layers * kv_heads) + head) * pages + entry // block_size
    found = tables.flatten().index_select(0, place.flatten()).long().view_as(entry) * block_size + entry % block_size
    return found.transpose(0, 1).flatten(1)


def own_block(counts: Int[Tensor, "*rows kv_heads"], length: int, block_size: int) -> int:
    """The first logical block that is a request's own, where it goes on after `length` tokens with these shared counts.

    It is the last one there is, or the one before where some head's last page runs full earlier than that: the block
    with that head's next page must be there by then.
    """
    last, filled = (length - 1) // block_size, (length - 1) % block_size + 1
    return last - int(bool(((counts - 1) % block_size >= filled).any()))


def shareable_pages(counts: Int[Tensor, "*rows kv_heads"], block_size: int) -> Int[Tensor, "*rows kv_heads"]:
    """Full pages of each head with so many entries; its last one never counts, so that there is one to go on in."""
    return (_ceil_div(counts, block_size) - 1).clamp(min=0)


def _numbers(
    layout: PageLayout, page: Int[Tensor, " pages"], block_size: int
) -> tuple[Int[Tensor, "rows layers kv_heads pages"], Bool[Tensor, "rows layers kv_heads pages"]]:
    """Which of its request's sub-pages each page of each head is, and whether it was packed at the event.

    A head's pages lie on two lines: those of the event one after another, those since `kv_heads` apart. They are
    numbered from block `first` on; those that were packed and are shared, from the layer's first such page on.
    """
    counts, shared = layout.counts, layout.shared[..., None] > 0
    kv_heads = counts.shape[-1]
    kept = torch.where(shared, shareable_pages(counts, block_size), _ceil_div(counts, block_size))
    end = kept.cumsum(-1)
    # Heads with fewer free places run full earlier; of equal ones the lower head takes its page first.
    heads = torch.arange(kv_heads, device=counts.device)
    free = torch.where(shared, 0, -counts % block_size)
    rank = (free * kv_heads + heads).argsort(-1).argsort(-1)
    # Page `kept` is the first since the event: all that was packed there and then `rank` other heads' pages precede it.
    later = torch.where(shared, 0, end[..., -1:]) + rank - kept * kv_heads
    start, packed = (end - kept)[..., None] + page, page < kept[..., None]
    return start.where(packed, later[..., None] + page * kv_heads), packed


def _ceil_div(numerator: Int[Tensor, "*shape"], denominator: int) -> Int[Tensor, "*shape"]:
    return (numerator + denominator - 1) // denominator
