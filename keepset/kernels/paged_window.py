"""What entries in pages receive of a few queries: added to a number of each entry, its keys where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.kernels import subpages
from keepset.kernels.blocks import PRODUCT_BLOCK, block_size
from keepset.kernels.dispatch import launched_on, uses_triton
from keepset.kernels.page_entries import Cache, addresses_of, read_pages
from keepset.kernels.subpages import Group, Layout
from keepset.kernels.window import GroupSums, received_attention

ReadKeys = Callable[[Int[Tensor, "kv_heads pages"]], Float[Tensor, "kv_heads entries head_dim"]]
"""Keys of whole sub-pages, as one layer numbers them, each head's pages joined."""


class EntriesInPages(NamedTuple):
    """Where the entries of some requests lie; contiguous.

    Attributes:
        layout: what the heads' pages follow from: layer by layer of a group, or one that is all layers'.
        block_table: blocks of each request by logical position.
        lengths: tokens of each request.
        packed: of each head the first so many entries were packed after the event before, layer by layer as in the
            layout: those that it kept, and, where heads differ, those that came behind the event in its own step. They
            alone have positions and biases of their own.
        longest: no head has more entries.
    """

    layout: Layout
    block_table: Int[Tensor, "rows width"]
    lengths: Int[Tensor, " rows"]
    packed: Int[Tensor, "rows layers kv_heads"]
    longest: int

    def of_layers(self, places: range) -> EntriesInPages:
        """Those of some layers of the group."""
        some = slice(places.start, places.stop) if self.packed.shape[1] > 1 else slice(None)
        return self._replace(layout=Layout(*(part[:, some] for part in self.layout)), packed=self.packed[:, some])


class RecordedQueries(NamedTuple):
    """Queries of some requests after rotation, in each of some layers.

    Attributes:
        rings: where they lie, of each query's numbers one after another.
        slots: of the requests.
        places: of each query in its slot.
    """

    rings: Float[Tensor, "layers slots places query_heads head_dim"]
    slots: Int[Tensor, " rows"]
    places: Int[Tensor, "rows n"]

    def of_layers(self, layers: range) -> Float[Tensor, "layers_rows query_heads n head_dim"]:
        """The queries, layer after layer, of some of these layers."""
        chosen = self.rings[layers.start : layers.stop, self.slots[:, None], self.places]
        return chosen.transpose(2, 3).flatten(0, 1)


class Received(NamedTuple):
    """What is added up, and where; columns are contiguous.

    Attributes:
        column: numbers for each slot `subpage * block_size + offset` of each layer of the group; it is written to.
        last_visible: the last position that a query sees, in rising order; before the first, and it gives nothing.
        unwritten: of how many of the newest entries of each head the column's numbers mean nothing yet.
        scaling: of the logits.
        sums_of: what is added up of the query heads of a group.
        bias: of each slot, added to the logits of entries that were packed.
        positions: of each slot that was packed, whole numbers bit for bit; None where queries see all that was kept.
        own: of requests that have numbers of their own, instead of those at the slots, these: a place for each entry in
            its order; None of others, and nothing at all where there are only those.
    """

    column: Float[Tensor, "layers slots *group"]
    last_visible: Int[Tensor, "rows n"]
    unwritten: Int[Tensor, " rows"]
    scaling: float
    sums_of: GroupSums = GroupSums.MEAN
    bias: Float[Tensor, "layers slots"] | None = None
    positions: Float[Tensor, "layers slots"] | None = None
    own: Sequence[Float[Tensor, "layers kv_heads places *group"] | None] = ()


def add_received_in_pages(
    caches: Sequence[Cache], places: range, queries: RecordedQueries, entries: EntriesInPages, received: Received
) -> None:
    """Adds what every entry receives of some queries: their attention, summed over them.

    On a GPU it takes two launches for all layers, and nothing waits for the device.

    Args:
        caches: of the layers that share the block table, with any strides, but for an entry's own numbers.
        places: of those in question, among these.
        queries: of these layers.
        entries: of the requests, in all layers.
        received: what is added up, and where.
    """
    if uses_triton(caches[0].device):
        from keepset.kernels.triton import paged_window  # loads Triton

        with launched_on(caches[0].device):
            paged_window.add_received(caches[0], addresses_of(caches), places, queries, entries, received)
        return
    keys = [cache[..., : cache.shape[3] // 2] for cache in caches]

    def reader(place: int) -> ReadKeys:
        return lambda table: read_pages(keys, place, table)

    group = Group(places, len(caches), len(caches[0]))
    add_received_by([reader(place) for place in places], caches[0].shape[2], group, queries, entries, received)


def add_received_by(
    readers: Sequence[ReadKeys],
    size: int,
    group: Group,
    queries: RecordedQueries,
    entries: EntriesInPages,
    received: Received,
) -> None:
    """`add_received_in_pages` layer by layer, wherever the keys are.

    Args:
        readers: of the layers in question.
        size: entries of a sub-page.
        group: these layers among those that share the block table.
        queries, entries, received: as there.
    """
    for layer, (place, read) in enumerate(zip(group.places, readers, strict=True)):
        if layer == 0 or entries.packed.shape[1] > 1:
            own = group._replace(places=range(place, place + 1))
            one = entries.of_layers(own.places)
            counts = subpages.entries(one.layout, one.lengths)
            most = -(-int(counts.max()) // size)
            tables = subpages.tables(one.layout, counts, one.block_table, size, most, own)[:, 0].long()
        few = queries.of_layers(range(layer, layer + 1))
        _add_received_of_layer(place, read, size, few, tables, counts[:, 0], one, received)


def _add_received_of_layer(
    layer: int,
    read: ReadKeys,
    size: int,
    queries: Float[Tensor, "rows query_heads n head_dim"],
    tables: Int[Tensor, "rows kv_heads pages"],
    counts: Int[Tensor, "rows kv_heads"],
    entries: EntriesInPages,
    received: Received,
) -> None:
    kv_heads, shared, of_layer = counts.shape[1], received.column.flatten(0, 1), received.column.shape[1]
    place = torch.arange(tables.shape[-1] * size, device=shared.device)
    # Numbers of pages go on into the following layers.
    slots = (tables[..., None] * size + torch.arange(size, device=place.device)).flatten(-2)
    slots = (layer * of_layer + slots) % len(shared)
    there, packed = place < counts[..., None], place < entries.packed[:, 0, :, None]
    # What came since the event before is whole: each entry lies as far behind its position as were dropped. What was
    # kept is older than every query, and so it is where it is taken to lie just before.
    positions = place + (entries.lengths[:, None] - counts)[..., None]
    if received.positions is not None:
        positions = received.positions.view(-1)[slots].view(torch.int32).long().where(packed, positions)
    biases = None if received.bias is None else received.bias.view(-1)[slots].where(packed, 0)
    written = place < (counts - received.unwritten[:, None])[..., None]
    grouped = queries.unflatten(1, (kv_heads, -1)).flatten(0, 1)
    last = received.last_visible.repeat_interleave(kv_heads, 0)
    heads = [part.flatten(0, 1) for part in (tables, there, positions, written, slots)]
    at_once = max(1, block_size(shared.device, PRODUCT_BLOCK) // max(1, len(place) * queries.shape[-1]))
    if received.own:  # one after another
        at_once = 1
    for head in range(0, counts.numel(), at_once):
        part = slice(head, head + at_once)
        table, exists, positions_here, known, target = (each[part] for each in heads)
        column, own = shared, received.own[head // kv_heads] if received.own else None
        if own is not None:
            column, target = own[layer, head % kv_heads], place[None]
        bias = None if biases is None else biases.flatten(0, 1)[part]
        made = received_attention(
            grouped[part], read(table), positions_here, last[part], received.scaling, exists, received.sums_of, bias
        )
        sums, before = received.sums_of.of(made)[exists], column[target[exists]]
        column[target[exists]] = sums + before.where(known[exists].view(-1, *[1] * (sums.dim() - 1)), 0)
