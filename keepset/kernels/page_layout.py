"""Page tables of requests whose heads keep different numbers of entries, and the arguments of kernels over pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from keepset.kernels.softmax import GroupReduction, Softmax

LayerPages = Shaped[Tensor, "blocks kv_heads block_size width"]
"""The cache of one layer; only an entry's numbers must be contiguous. A sub-page is `block * kv_heads + head`."""


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


class FiledLayouts(NamedTuple):
    """The page layouts of all requests, each filed under the page that holds its request's newest token.

    Attributes:
        layout: the layout filed under each page, contiguous.
        tokens: the request's number of tokens when its layout was filed.
    """

    layout: PageLayout
    tokens: Int[Tensor, " pages"]

    @classmethod
    def empty(cls, pages: int, layers: int, kv_heads: int, device: torch.device) -> FiledLayouts:
        """Return a table of zeros, without any request.

        Args:
            pages: blocks of the cache.
            layers, kv_heads: of the layouts.
            device: where the table is.
        """
        shapes = (pages, layers, kv_heads), *[(pages, layers)] * 3, (pages,)
        *layout, tokens = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)
        return cls(PageLayout(*layout), tokens)


class PagedTokens(NamedTuple):
    """New tokens of a step. Each sees its request's entries up to itself. All vectors are contiguous.

    Attributes:
        block_table: blocks of each row by logical position.
        lengths: number of tokens of the request up to and with each token; 0 for padding tokens of the step.
        longest: an upper bound of the lengths.
        places: index of each token among the step's tokens; None: 0, 1, 2 and so on.
        rows: each token's row of the block table; None together with `places`: token `i` has row `i`.
        slots: slot of each token; negative for tokens that belong to no request, which are not written.
    """

    block_table: Int[Tensor, "rows width"]
    lengths: Int[Tensor, " n"]
    longest: int
    places: Int[Tensor, " n"] | None = None
    rows: Int[Tensor, " n"] | None = None
    slots: Int[Tensor, " n"] | None = None


class EntriesInPages(NamedTuple):
    """Places of the entries of requests. All tensors are contiguous.

    Attributes:
        layout: the layout of each layer of a group, or of one layer that stands for all.
        block_table: blocks of each request by logical position.
        lengths: tokens of each request.
        packed: how many of each head's first entries were packed at the newest event: those that it kept and, if heads
            differ, those of later tokens of its step. Only these have stored positions and biases.
        longest: an upper bound of a head's entries.
    """

    layout: PageLayout
    block_table: Int[Tensor, "rows width"]
    lengths: Int[Tensor, " rows"]
    packed: Int[Tensor, "rows layers kv_heads"]
    longest: int

    def of_layers(self, layers: range) -> EntriesInPages:
        """Return the places of the entries in some layers of the group."""
        chosen = slice(layers.start, layers.stop) if self.packed.shape[1] > 1 else slice(None)
        return self._replace(
            layout=PageLayout(*(part[:, chosen] for part in self.layout)), packed=self.packed[:, chosen]
        )


class RecordedQueries(NamedTuple):
    """Queries of some requests after rotation, in each of some layers.

    Attributes:
        rings: buffers that hold the queries; each query's numbers are contiguous.
        slots: slot of each request in the buffers.
        places: index of each query in its slot.
    """

    rings: Float[Tensor, "layers slots places query_heads head_dim"]
    slots: Int[Tensor, " rows"]
    places: Int[Tensor, "rows n"]

    def of_layers(self, layers: range) -> Float[Tensor, "layers_rows query_heads n head_dim"]:
        """Return the queries of some of these layers, layer after layer."""
        chosen = self.rings[layers.start : layers.stop, self.slots[:, None], self.places]
        return chosen.transpose(2, 3).flatten(0, 1)


class ColumnTarget(NamedTuple):
    """Columns to which the attention that entries receive is added; they are contiguous.

    Attributes:
        column: numbers of each slot `subpage * block_size + offset` of each layer of the group; written to.
        last_visible: the last position that each query sees, in rising order; a negative one sees nothing.
        unwritten: how many of each head's newest entries have no number in the column yet.
        softmax: the layers' softmax; its sinks are `[layers, query_heads]`, for each layer of the group.
        sums_of: how to reduce the query heads that share a KV head.
        bias: bias of each slot, added to the logits of packed entries.
        positions: position of each packed slot, int32 stored as float32 bits; None if queries see all kept entries.
        own: the private column of each request, with a place for each entry in order, or None for a request whose
            numbers are in `column`. Empty if no request has a private one.
    """

    column: Float[Tensor, "layers slots *group"]
    last_visible: Int[Tensor, "rows n"]
    unwritten: Int[Tensor, " rows"]
    softmax: Softmax
    sums_of: GroupReduction = GroupReduction.MEAN
    bias: Float[Tensor, "layers slots"] | None = None
    positions: Float[Tensor, "layers slots"] | None = None
    own: Sequence[Float[Tensor, "layers kv_heads places *group"] | None] = ()


class Addresses(NamedTuple):
    """Addresses at which the caches of layers begin.

    Attributes:
        on_device: addresses, on the layers' device.
        aligned: whether each is a multiple of 16 bytes, which a GPU loads at once.
    """

    on_device: Int[Tensor, " layers"]
    aligned: bool


def entries(layout: PageLayout, lengths: Int[Tensor, " rows"]) -> Int[Tensor, "rows layers kv_heads"]:
    """Return the entries of every head when its request has `lengths` tokens: `counts + lengths - length`.

    Args:
        layout: the newest event of each request.
        lengths: tokens of each request, at least as many as at the event.
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
        layer_indices = torch.arange(group.places.start, group.places.stop, device=page.device)[:, None, None]
        layer_distance = (through // kv_heads - layer_indices) % group.layers
        beyond = (layer_distance * group.blocks).where(shared, 0)
        number = torch.where(shared, through, number)
    # Before the lookup, because a column that no head needs may point outside the block table.
    block = block.where(needed, 0)
    found = block_table.gather(1, block.flatten(1).long()).view(block.shape)
    return ((beyond + found) * kv_heads + number % kv_heads).where(needed, 0).to(block_table.dtype)


def to_group_pages(tables: Int[Tensor, "layers *rest"], group: PageGroup, kv_heads: int) -> Int[Tensor, "layers *rest"]:
    """Return sub-pages of each layer of the group, numbered from the group's first layer on.

    Args:
        tables: sub-pages of each layer, numbered from that layer on.
        group: the layers.
        kv_heads: KV heads of a layer.
    """
    layer_indices = torch.arange(group.places.start, group.places.stop, device=tables.device)
    before = (layer_indices * (group.blocks * kv_heads)).view(-1, *[1] * (tables.ndim - 1))
    return (tables.long() + before) % (group.layers * group.blocks * kv_heads)


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
    table_index = (rows[:, None, None] * (layers * kv_heads) + head) * pages + entry // block_size
    found = (
        tables.flatten().index_select(0, table_index.flatten()).long().view_as(entry) * block_size + entry % block_size
    )
    return found.transpose(0, 1).flatten(1)


def blocks_needed(
    counts: Int[Tensor, "*rows kv_heads"], length: Int[Tensor, "*rows"], block_size: int
) -> Int[Tensor, "*rows"]:
    """Return how many of a request's last blocks hold its heads, now and at any later length.

    Only the moment when the request's newest block is full, `tail` tokens from now, matters. Until then no block is
    added and pages are only taken. After it, every `block_size` tokens add one block, which has one sub-page for each
    head, and take one page for each head.

    Args:
        counts: entries of each head.
        length: tokens of the request.
        block_size: entries of a page.
    """
    kv_heads = counts.shape[-1]
    tail = -length % block_size
    return _ceil_div(_ceil_div(counts + tail[..., None], block_size).sum(-1), kv_heads)


def own_block(counts: Int[Tensor, "*rows kv_heads"], length: int, block_size: int) -> int:
    """Return the first private logical block of a request that continues after `length` tokens with shared pages.

    It is the last block, or the block before if some head's last page fills up earlier: the block with that head's next
    page must exist by then.

    Args:
        counts: entries of each head.
        length: tokens of the request.
        block_size: entries of a page.
    """
    last, filled = (length - 1) // block_size, (length - 1) % block_size + 1
    return last - int(bool(((counts - 1) % block_size >= filled).any()))


def shareable_pages(counts: Int[Tensor, "*rows kv_heads"], block_size: int) -> Int[Tensor, "*rows kv_heads"]:
    """Return how many pages of each head can be shared: all but the last, to which the head's next entries go.

    Args:
        counts: entries of each head.
        block_size: entries of a page.
    """
    return (_ceil_div(counts, block_size) - 1).clamp(min=0)


def _numbers(
    layout: PageLayout, page: Int[Tensor, " pages"], block_size: int
) -> tuple[Int[Tensor, "rows layers kv_heads pages"], Bool[Tensor, "rows layers kv_heads pages"]]:
    """Return each page's number among its request's sub-pages, and whether it was packed at the event.

    Pages that were packed at the event are consecutive; later pages are `kv_heads` apart. Numbers count from block
    `first`. Shared pages count from the layer's first shared page.

    Args:
        layout: the newest event of each request.
        page: which of a head's pages.
        block_size: entries of a page.
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
    return (numerator + denominator - 1) // denominator
