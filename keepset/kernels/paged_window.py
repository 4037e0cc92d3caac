"""What entries in pages receive of a few queries: added to a number of each entry, its keys where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.kernels import subpages
from keepset.kernels.blocks import PRODUCT_BLOCK, block_size
from keepset.kernels.dispatch import launched_on, uses_triton
from keepset.kernels.page_entries import Cache, addresses_of, read_pages
from keepset.kernels.paged_arguments import EntriesInPages, Received, RecordedQueries
from keepset.kernels.subpages import Group
from keepset.kernels.window import received_attention

ReadKeys = Callable[[Int[Tensor, "kv_heads pages"]], Float[Tensor, "kv_heads entries head_dim"]]
"""Keys of whole sub-pages, as one layer numbers them, each head's pages joined."""


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
            heads = _Heads.of(entries.of_layers(own.places), own, size, received)
        _add_received_of_layer(place, read, queries.of_layers(range(layer, layer + 1)), heads, received)


class _Heads(NamedTuple):
    """Where entries of all heads of all requests lie in a layer, padded to one length; of some, `chosen`, at the slots.

    Attributes:
        tables: their sub-pages.
        slots: of the entries, as the layer numbers them.
        exists, packed: which of them do, and which were packed after the event before.
        positions: in the text, unless they are stored.
        written: how many of each head have a number.
        chosen: existing entries of requests whose numbers are at the slots, all heads' one after another.
        known: which of these have a number.
    """

    tables: Int[Tensor, "heads pages"]
    slots: Int[Tensor, "heads places"]
    exists: Bool[Tensor, "heads places"]
    packed: Bool[Tensor, "heads places"]
    positions: Int[Tensor, "heads places"]
    written: Int[Tensor, " heads"]
    chosen: Int[Tensor, " n"]
    known: Bool[Tensor, " n"]

    @classmethod
    def of(cls, entries: EntriesInPages, group: Group, size: int, received: Received) -> _Heads:
        """Those of a layer, by its part of `entries`."""
        counts = subpages.entries(entries.layout, entries.lengths)
        most = -(-int(counts.max()) // size)
        tables = subpages.tables(entries.layout, counts, entries.block_table, size, most, group).long()[:, 0]
        counts, packed = counts[:, 0], entries.packed[:, 0]
        place = torch.arange(most * size, device=counts.device)
        slots = (tables[..., None] * size + torch.arange(size, device=place.device)).flatten(-2)
        # What came since the event before is whole: each entry lies as far behind its position as were dropped. What
        # was kept is older than every query, and so it is where it is taken to lie just before.
        positions = place + (entries.lengths[:, None] - counts)[..., None]
        written, exists = counts - received.unwritten[:, None], place < counts[..., None]
        shared = exists
        if received.own:
            shared = exists & torch.tensor([own is None for own in received.own], device=place.device)[:, None, None]
        chosen, known = shared.flatten().nonzero()[:, 0], place < written[..., None]
        parts = tables, slots, exists, place < packed[..., None], positions, written
        tables, slots, exists, packed, positions, written = (part.flatten(0, 1) for part in parts)
        return cls(tables, slots, exists, packed, positions, written, chosen, known.flatten()[chosen])


def _add_received_of_layer(
    layer: int, read: ReadKeys, queries: Float[Tensor, "rows query_heads n head_dim"], heads: _Heads, received: Received
) -> None:
    rows, number = len(queries), len(heads.slots)
    kv_heads, column, of_layer = number // rows, received.column.flatten(0, 1), received.column.shape[1]
    # Numbers of pages go on into the following layers.
    slots, positions, biases = (layer * of_layer + heads.slots) % len(column), heads.positions, None
    if received.positions is not None:
        positions = received.positions.view(-1)[slots].view(torch.int32).long().where(heads.packed, positions)
    if received.bias is not None:
        biases = received.bias.view(-1)[slots].where(heads.packed, 0)
    grouped = queries.unflatten(1, (kv_heads, -1)).flatten(0, 1)
    last = received.last_visible.repeat_interleave(kv_heads, 0)
    sums = column.new_empty(*slots.shape, *column.shape[1:])
    at_once = max(1, block_size(column.device, PRODUCT_BLOCK) // max(1, slots.shape[1] * queries.shape[-1]))
    for head in range(0, number, at_once):
        part = slice(head, head + at_once)
        bias = None if biases is None else biases[part]
        made = received_attention(
            grouped[part], read(heads.tables[part]), positions[part], last[part], received.scaling, heads.exists[part],
            received.sums_of, bias,
        )  # fmt: skip
        sums[part] = received.sums_of.of(made)
    target = slots.flatten()[heads.chosen]
    column[target] = sums.flatten(0, 1)[heads.chosen] + _numbers(column[target], heads.known)
    for row, own in enumerate(received.own):
        if own is None:
            continue
        for head, one in enumerate(range(row * kv_heads, (row + 1) * kv_heads)):
            exists = int(heads.exists[one].sum())
            known = torch.arange(exists, device=column.device) < heads.written[one]
            numbers = own[layer, head, :exists]
            own[layer, head, :exists] = sums[one, :exists] + _numbers(numbers, known)


def _numbers(
    numbers: Float[Tensor, entries * group], known: Bool[Tensor, " entries"]
) -> Float[Tensor, entries * group]:
    """Numbers of entries, of which some mean nothing yet."""
    return numbers.where(known.view(-1, *[1] * (numbers.dim() - 1)), 0)
