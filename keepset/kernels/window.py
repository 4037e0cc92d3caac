"""Attention that entries receive from a few queries, summed over the queries, in packed heads and in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.kernels import page_layout
from keepset.kernels.dispatch import CACHE_BLOCK, PRODUCT_BLOCK, block_size, launched_on, uses_triton
from keepset.kernels.packed import PackedHeads
from keepset.kernels.page_entries import addresses_of, read_keys
from keepset.kernels.page_format import PageFormat
from keepset.kernels.page_layout import ColumnTarget, EntriesInPages, LayerPages, PageGroup, RecordedQueries
from keepset.kernels.softmax import GroupReduction, Softmax, normalised

ReadKeys = Callable[[Int[Tensor, "kv_heads pages"]], Float[Tensor, "kv_heads entries head_dim"]]
"""Returns the keys of whole sub-pages of one layer, each head's pages joined."""


def received_attention(
    queries: Float[Tensor, "heads group n head_dim"],
    keys: Float[Tensor, "heads entries head_dim"],
    positions: Int[Tensor, "heads entries"],
    last_visible: Int[Tensor, "heads n"],
    softmax: Softmax,
    valid: Bool[Tensor, "heads entries"] | None = None,
    sums_of: GroupReduction = GroupReduction.EACH,
    bias: Float[Tensor, "heads entries"] | None = None,
) -> Float[Tensor, "heads _ entries"]:
    """Return the attention that each entry receives from some queries, summed over the queries, in float32.

        sum over queries q of softmax(q @ keys' * scaling + bias)

    On a CPU attention is computed and summed in blocks that stay in a core's cache. On a GPU two Triton kernels compute
    the sums without storing attention.

    Args:
        queries: queries after rotation, of each KV head's group.
        last_visible: the last position that each query sees, in rising order; -1 for a query that does not exist.
        softmax: the model's softmax; its sinks are those of these heads, `[heads, group]`.
        valid: which entries exist; None: all.
        sums_of: whether each query head counts, or their largest logits as if they were one head.
        bias: added to the logit of each entry.

    Returns:
        One row for each query head of a group, or one row if only the largest logits count.
    """
    if uses_triton(keys.device):
        from keepset.kernels.triton import window  # loads Triton

        with launched_on(keys.device):
            return window.received_attention(queries, keys, positions, last_visible, softmax, valid, sums_of, bias)
    heads, group, n, size = queries.shape
    entries = keys.shape[1]
    first = first_unseen(positions, last_visible, valid)
    largest = sums_of is GroupReduction.LARGEST
    totals = torch.zeros(heads, 1 if largest else group, entries, dtype=torch.float32, device=keys.device)
    most = block_size(keys.device, CACHE_BLOCK)
    # A block is several heads, or several queries of one head.
    at_once = max(1, most // (max(entries, 1) * max(group * n, size)))
    rows = max(1, most // (max(entries, 1) * group))
    for head in range(0, heads, at_once):
        part = slice(head, head + at_once)
        visible = positions[part, None, first:] <= last_visible[part, :, None]
        if valid is not None:
            visible &= valid[part, None, first:]
        few = queries[part].float() * softmax.scaling
        sinks = None if softmax.sinks is None else softmax.sinks[part, :, None]
        if largest and sinks is not None:
            sinks = sinks.amax(1, keepdim=True)
        facing = keys[part].float().transpose(1, 2)
        for chosen, row_visible in zip(few.split(rows, 2), visible.split(rows, 1), strict=True):
            logits = softmax.capped(chosen.flatten(1, 2) @ facing).unflatten(1, (group, -1))
            if bias is not None:
                logits += bias[part, None, None]
            if largest:
                logits = logits.amax(1, keepdim=True)
            totals[part] += masked_softmax(logits, row_visible[:, None], sinks).sum(2)
    return totals


def add_received(
    column: Float[Tensor, "places *group"],
    queries: Float[Tensor, "batch query_heads n head_dim"],
    packed: PackedHeads,
    kv_heads: int,
    last_visible: Int[Tensor, "batch n"],
    softmax: Softmax,
    sums_of: GroupReduction = GroupReduction.MEAN,
) -> None:
    """Add to a column the attention that every entry of packed heads receives from some queries.

    Args:
        column: numbers of the heads' places; written to.
        queries, last_visible: those of all requests, as in `received_attention`.
        softmax: the model's softmax; its sinks are `[query_heads]`.
        packed: all heads of all requests.
        sums_of: how to reduce the query heads that share a KV head.
    """
    if packed.in_triton:
        from keepset.kernels.triton import window  # loads Triton

        if packed.format and packed.format.refined:
            packed = packed.whole()
        elif packed.format:
            queries = packed.format.mix(queries)
        with launched_on(packed.keys.device):
            return window.add_received(column, queries, packed, kv_heads, last_visible, softmax, sums_of)
    if packed.format:
        queries = packed.format.mix(queries)
    grouped = queries.unflatten(1, (kv_heads, -1)).flatten(0, 1)
    last = last_visible[:, None].expand(-1, kv_heads, -1).flatten(0, 1)
    softmax = softmax.by_query_group(len(queries), kv_heads)
    for run in packed.pieces:
        heads = slice(run.first, run.first + run.heads)
        keys, positions = packed.rows(run, "keys"), run.view(packed.positions)
        bias = None if packed.bias is None else run.view(packed.bias)
        head_softmax = softmax if softmax.sinks is None else replace(softmax, sinks=softmax.sinks[heads])
        sums = received_attention(grouped[heads], keys, positions, last[heads], head_softmax, None, sums_of, bias)
        run.view(column).add_(sums_of.of(sums))


def first_unseen(
    positions: Int[Tensor, "*heads entries"],
    last_visible: Int[Tensor, "*#heads n"],
    valid: Bool[Tensor, "*heads entries"] | None = None,
) -> int:
    """Return the first entry that the oldest query does not see; all queries see the entries before it.

    On a GPU it is always 0, because finding it would need a host sync.

    Args:
        positions: of the entries.
        last_visible: the last position that each query sees, in rising order.
        valid: which entries exist; None: all.
    """
    if positions.device.type != "cpu":
        return 0
    hidden = positions > last_visible[..., :1]
    if valid is not None:
        hidden |= ~valid
    return int(F.pad(hidden.flatten(0, -2).any(0), (0, 1), value=True).int().argmax())


def masked_softmax(
    logits: Float[Tensor, "*rows entries"],
    visible: Bool[Tensor, "*#rows last"],
    sinks: Float[Tensor, "*#rows"] | None = None,
) -> Float[Tensor, "*rows entries"]:
    """Return the softmax of logits under a mask; zero for a query that sees nothing.

    Args:
        logits: logits of all entries; written to.
        visible: mask of the last entries; the entries before are visible to all queries.
        sinks: logit of each row's sink; None if there are none.
    """
    if visible.shape[-1]:
        # Masking also the entries that all queries see would cost as much as the softmax.
        logits[..., -visible.shape[-1] :].masked_fill_(~visible, float("-inf"))
    attention = normalised(logits, sinks)
    if visible.shape[-1] == logits.shape[-1]:
        attention.masked_fill_(~visible.any(-1, keepdim=True), 0.0)
    return attention


def add_received_in_pages(
    caches: Sequence[LayerPages],
    layers: range,
    queries: RecordedQueries,
    entries: EntriesInPages,
    received: ColumnTarget,
    formats: Sequence[PageFormat] = (),
) -> None:
    """Add to a column the attention that every entry receives from some queries, summed over the queries.

        column[slot of entry e] += sum over queries q of softmax(q @ keys' * scaling + bias)[e]

    On a GPU this takes two launches for all layers, without a host sync.

    Args:
        caches: caches of the layers that share the block table; only an entry's numbers must be contiguous.
        layers: indices of the layers to add in.
        queries: queries of these layers.
        entries: places of the requests' entries in all layers.
        received: the column, and how to sum.
        formats: the formats of these layers' caches if they are quantised.
    """
    first = caches[0]
    if uses_triton(first.device):
        from keepset.kernels.triton import paged_window  # loads Triton

        with launched_on(first.device):
            for layer_range, layer_queries in _mixed(queries, formats):
                of_layers = range(layers.start + layer_range.start, layers.start + layer_range.stop)
                paged_window.add_received(
                    first,
                    addresses_of(caches),
                    of_layers,
                    layer_queries,
                    entries,
                    received,
                    formats[layer_range.start : layer_range.stop],
                )
        return

    def read(layer: int, table: Tensor) -> Tensor:
        rows = read_keys(caches, layer, table)
        if not formats:
            return rows
        format = formats[layer - layers.start]
        return format.decode(rows, format.key_scale)

    group = PageGroup(layers, len(caches), len(first))
    add_received_by([partial(read, layer) for layer in layers], first.shape[2], group, queries, entries, received)


def _mixed(queries: RecordedQueries, formats: Sequence[PageFormat]) -> Iterator[tuple[range, RecordedQueries]]:
    """Yield layers with their queries; if keys are mixed, copies of mixed queries, for some layers at a time.

    Args:
        queries: of some layers.
        formats: of these layers' caches; empty if they are not quantised.
    """
    layers = range(len(queries.rings))
    if not formats or (mixing := formats[0].mixing) is None:
        yield layers, queries
        return
    (rows, n), (_, _, _, heads, head_dim) = queries.places.shape, queries.rings.shape
    at_once = max(1, block_size(queries.rings.device, PRODUCT_BLOCK) // max(1, rows * n * heads * head_dim))
    row, order = (torch.arange(size, device=queries.places.device) for size in (rows, n))
    for first in layers[::at_once]:
        layer_range = layers[first : first + at_once]
        ring_queries = queries.rings[layer_range.start : layer_range.stop, queries.slots[:, None], queries.places]
        yield layer_range, RecordedQueries(mixing.mixed_queries(ring_queries), row, order.expand(rows, n))


def add_received_by(
    readers: Sequence[ReadKeys],
    size: int,
    group: PageGroup,
    queries: RecordedQueries,
    entries: EntriesInPages,
    received: ColumnTarget,
) -> None:
    """Compute `add_received_in_pages` in PyTorch, layer by layer.

    Args:
        readers: for each layer a function that reads keys.
        size: entries of a page.
        group: the layers.
        queries, entries, received: as in `add_received_in_pages`.
    """
    most = _most_pages(page_layout.entries(entries.layout, entries.lengths), size) * size
    of_layer = max(1, len(entries.lengths) * entries.packed.shape[2] * most)
    at_once = max(1, block_size(entries.lengths.device, CACHE_BLOCK) // of_layer)
    for first in range(0, len(readers), at_once):
        part = range(first, min(first + at_once, len(readers)))
        subgroup = group._replace(places=group.places[part.start : part.stop])
        heads = _Heads.of(entries.of_layers(subgroup.places), subgroup, size, received)
        _add_received_of_layers(
            subgroup.places, readers[part.start : part.stop], queries.of_layers(part), heads, received
        )


class _Heads(NamedTuple):
    """Places of the entries of all heads of all requests in some layers, padded to one length.

    Attributes:
        tables: sub-pages of each head.
        slots: slot of each entry, in its layer's numbering.
        exists, packed: which entries exist, and which were packed at the newest event.
        positions: position of each entry that has no stored position.
        written: how many entries of each head have a number in the column.
        chosen: flat indices of the existing entries whose numbers are not in a private column.
        known: which of these have a number.
    """

    tables: Int[Tensor, "layers heads pages"]
    slots: Int[Tensor, "layers heads places"]
    exists: Bool[Tensor, "layers heads places"]
    packed: Bool[Tensor, "layers heads places"]
    positions: Int[Tensor, "layers heads places"]
    written: Int[Tensor, "layers heads"]
    chosen: Int[Tensor, " n"]
    known: Bool[Tensor, " n"]

    @classmethod
    def of(cls, entries: EntriesInPages, group: PageGroup, size: int, received: ColumnTarget) -> _Heads:
        """Return the places of the entries in the group's layers; `entries` holds these layers only.

        Args:
            entries: of the group's layers alone.
            group: the layers.
            size: entries of a page.
            received: the column.
        """
        counts = page_layout.entries(entries.layout, entries.lengths)
        most = _most_pages(counts, size)
        tables = page_layout.tables(entries.layout, counts, entries.block_table, size, most, group).long()
        counts, packed = (part.expand(tables.shape[:3]) for part in (counts, entries.packed))
        order = torch.arange(most * size, device=counts.device)
        slots = (tables[..., None] * size + torch.arange(size, device=order.device)).flatten(-2)
        # No entry since the event was dropped, so position minus place is the same for all of them. Kept entries are
        # older than every query, so it does not matter that they get the positions just before.
        positions = order + (entries.lengths[:, None, None] - counts)[..., None]
        written, exists = counts - received.unwritten[:, None, None], order < counts[..., None]
        parts = tables, slots, exists, order < packed[..., None], positions, written
        tables, slots, exists, packed, positions, written = (part.transpose(0, 1).flatten(1, 2) for part in parts)
        shared = exists
        if received.own:
            in_column = torch.tensor(
                [private is None for private in received.own], dtype=torch.bool, device=order.device
            )
            shared = exists & in_column.repeat_interleave(counts.shape[2])[:, None]
        chosen = shared.flatten().nonzero()[:, 0]
        has_number = (order < written[..., None]).flatten()[chosen]
        return cls(tables, slots, exists, packed, positions, written, chosen, has_number)


def _most_pages(counts: Int[Tensor, "rows layers kv_heads"], size: int) -> int:
    return -(-int(counts.max()) // size)


def _add_received_of_layers(
    layer_range: range,
    readers: Sequence[ReadKeys],
    queries: Float[Tensor, "layers_rows query_heads n head_dim"],
    heads: _Heads,
    received: ColumnTarget,
) -> None:
    """Add the attention that entries of some layers receive.

    Args:
        layer_range: indices of the layers.
        readers: for each layer a function that reads keys.
        queries: of these layers.
        heads: where the entries are.
        received: the column, and how to sum.
    """
    layers, number = heads.slots.shape[:2]
    rows = len(queries) // layers
    kv_heads, column, of_layer = number // rows, received.column.flatten(0, 1), received.column.shape[1]
    # Page numbers continue into the following layers.
    before = of_layer * torch.arange(layer_range.start, layer_range.stop, device=column.device)
    slots, positions, biases = (before[:, None, None] + heads.slots) % len(column), heads.positions, None
    if received.positions is not None:
        positions = received.positions.view(-1)[slots].view(torch.int32).long().where(heads.packed, positions)
    if received.bias is not None:
        biases = received.bias.view(-1)[slots].where(heads.packed, 0)
    grouped = queries.unflatten(1, (kv_heads, -1)).unflatten(0, (layers, rows)).flatten(1, 2)
    last = received.last_visible.repeat_interleave(kv_heads, 0)
    sums = column.new_empty(*slots.shape, *column.shape[1:])
    at_once = max(1, block_size(column.device, PRODUCT_BLOCK) // max(1, slots.shape[2] * queries.shape[-1]))
    for layer, (layer_index, read) in enumerate(zip(layer_range, readers, strict=True)):
        softmax = received.softmax.of_layer(layer_index).by_query_group(rows, kv_heads)
        for head in range(0, number, at_once):
            block = slice(head, head + at_once)
            part = layer, block
            bias = None if biases is None else biases[part]
            head_softmax = softmax if softmax.sinks is None else replace(softmax, sinks=softmax.sinks[block])
            attention_sums = received_attention(
                grouped[part], read(heads.tables[part]), positions[part], last[block], head_softmax,
                heads.exists[part], received.sums_of, bias,
            )  # fmt: skip
            sums[part] = received.sums_of.of(attention_sums)
    target = slots.flatten()[heads.chosen]
    column[target] = sums.flatten(0, 2)[heads.chosen] + _numbers(column[target], heads.known)
    for row, private in enumerate(received.own):
        if private is None:
            continue
        for layer, layer_index in enumerate(layer_range):
            for head, row_head in enumerate(range(row * kv_heads, (row + 1) * kv_heads)):
                exists = int(heads.exists[layer, row_head].sum())
                has_number = torch.arange(exists, device=column.device) < heads.written[layer, row_head]
                numbers = private[layer_index, head, :exists]
                private[layer_index, head, :exists] = sums[layer, row_head, :exists] + _numbers(numbers, has_number)


def _numbers(
    numbers: Float[Tensor, "entries *group"], has_number: Bool[Tensor, " entries"]
) -> Float[Tensor, "entries *group"]:
    """Return the numbers of entries, zero for those that have none yet.

    Args:
        numbers: of a column.
        has_number: which of them were written.
    """
    return numbers.where(has_number.view(-1, *[1] * (numbers.dim() - 1)), 0)
