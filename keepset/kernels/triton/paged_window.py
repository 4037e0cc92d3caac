"""Attention that entries in an engine's pages receive from a few queries; two launches for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from keepset.kernels import dispatch
from keepset.kernels.page_format import layer_scales
from keepset.kernels.page_layout import ColumnTarget
from keepset.kernels.softmax import GroupReduction
from keepset.kernels.triton.page_entries import as_bytes, kind_of, load_numbers, load_scales
from keepset.kernels.triton.paged import _dealt_to, _find
from keepset.kernels.triton.softmax import (
    LEAST_PART,
    PROGRAMS_PER_PROCESSOR,
    add_numbers,
    begun,
    log_sum_exp,
    query_sizes,
    received,
    seen_logits,
    streamed,
)

_PARTS = 4, 16
"""The least and the most parts of a long head; at least some, because other heads may be far shorter."""


def add_received(cache, addresses, layer_range, queries, entries, target, formats) -> None:
    """Compute `keepset.kernels.window.add_received_in_pages`.

    Two programs never add to the same place, so sums have a fixed order. The length of a head's parts depends on its
    entries, which only the device knows.

    Args:
        cache: of one of the layers.
        addresses: of the group's caches.
        layer_range: the `layers` there.
        queries, entries, formats: as there.
        target: the column, and how to sum.
    """
    (layers, _, _, query_heads, head_dim), (rows, n) = queries.rings.shape, queries.places.shape
    format = formats[0] if formats else None
    (_, kv_heads, size, _), of_group = cache.shape, entries.packed.shape[1]
    kind, key_scales = as_bytes(cache, format), layer_scales(formats, values=False)
    group, heads = query_heads // kv_heads, layers * rows * kv_heads
    largest = target.sums_of is GroupReduction.LARGEST
    sizes = query_sizes(group, n, head_dim, queries.rings.dtype, largest)
    blocks = triton.cdiv(n, sizes["TOKENS"])
    least, most = _PARTS
    even = triton.cdiv(dispatch.processors(kind.device) * PROGRAMS_PER_PROCESSOR, heads)
    parts = max(1, min(triton.cdiv(entries.longest, LEAST_PART), max(least, min(most, even))))
    # Always the width for the most parts: another width would be compiled while requests wait.
    partial = torch.empty(heads, blocks * sizes["ROWS"], most, dtype=torch.float32, device=kind.device)
    slots, at, last = (part.contiguous() for part in (queries.slots, queries.places, target.last_visible))
    softmax, sinks = target.softmax, target.softmax.sinks
    if sinks is not None:  # one for each row of a token, in each layer of the group
        sinks = sinks.float().view(len(addresses.on_device), kv_heads, -1)
        sinks = sinks.amax(2) if largest else sinks.contiguous()
    shared = (
        kind, addresses.on_device, key_scales, queries.rings, slots, at, last, target.bias,
        target.positions, entries.block_table, *entries.layout, entries.packed, entries.lengths,
        *kind.stride()[:3], *queries.rings.stride()[:4], entries.block_table.stride(0),
        kind.shape[0] * kv_heads * size, softmax.scaling, softmax.softcap or 1.0, sinks, n, rows,
        layer_range.start, of_group, len(addresses.on_device), parts,
    )  # fmt: skip
    sizes |= dict(
        HEADS=kv_heads, HEADS_BLOCK=triton.next_power_of_2(kv_heads), SIZE=size, LEAST_PART=LEAST_PART, PARTS=most,
        BIASED=target.bias is not None, PLACED=target.positions is not None, ALIGNED=addresses.aligned,
        CAPPED=softmax.softcap is not None, SINKS=sinks is not None, **kind_of(format),
    )  # fmt: skip
    _paged_lse[(heads, parts, blocks)](*shared, partial, **sizes)
    _add_in_pages[(heads, parts)](
        *shared, partial, target.column, target.unwritten.contiguous(), blocks, _own(target), **sizes,
        OWN=len(target.own) > 0, MEAN=target.sums_of is GroupReduction.MEAN,
        NUMBERS=sizes["WIDE"] if target.sums_of is GroupReduction.EACH else 1,
    )  # fmt: skip


def _own(target: ColumnTarget) -> Int[Tensor, "rows 2"] | None:
    """Return the address and the places per head of each request's private column, zeros if it has none."""
    if not target.own:
        return None
    rows = [(0, 0) if column is None else (column.data_ptr(), column.shape[2]) for column in target.own]
    return dispatch.upload(torch.tensor(rows, dtype=torch.long), target.column.device)


@triton.jit
def _place(
    block_table, counts, event_lengths, firsts, shares, packs, lengths, table_row, rows, first, of_group,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return the program's layer, request and head, the head's entries and packed entries, and its pages."""
    program = tl.program_id(0)
    head, row, layer = program % HEADS, program // HEADS % rows, program // HEADS // rows
    of_layer = row * of_group + (first + layer) % of_group
    shared = tl.load(shares + of_layer).to(tl.int32)
    count, pages, start, later = _dealt_to(counts + of_layer * HEADS, shared > 0, head, HEADS, HEADS_BLOCK, SIZE)
    length = tl.load(lengths + row).to(tl.int32)
    entries = count + length - tl.load(event_lengths + of_layer).to(tl.int32)
    packed = tl.load(packs + of_layer * HEADS + head).to(tl.int32)
    table, first_block = block_table + row.to(tl.int64) * table_row, tl.load(firsts + of_layer).to(tl.int32)
    return layer, row, head, length, entries, packed, table, first_block, shared, pages, start, later


@triton.jit
def _part(entries, parts, LEAST_PART: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many of a head's entries a program reads."""
    return tl.maximum(LEAST_PART, tl.cdiv(tl.cdiv(entries, parts), BLOCK) * BLOCK)


@triton.jit
def _logits(
    kind, addresses, key_scales, rings, slots, ring_indices, last_visible, bias, positions, layer, row, head, length,
    entries, packed, table, first_block, shared, pages, start, later, block, entry,
    cache_block, cache_head, cache_entry, ring_layer, ring_slot, ring_place, ring_head, slot_layer, scaling, cap, n,
    first, layers,
    GROUP: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, BIASED: tl.constexpr,
    PLACED: tl.constexpr, ALIGNED: tl.constexpr, CAPPED: tl.constexpr, FORMAT: tl.constexpr,
    OWN_SCALES: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Return the logits of a block of queries and a block of entries, and the slots of these entries."""
    line, dims = tl.arange(0, TOKENS * WIDE), tl.arange(0, HEAD_BLOCK)
    token, member = block * TOKENS + line // WIDE, line % WIDE
    exists = (token < n) & (member < GROUP)
    ring_index = tl.load(ring_indices + row * n + token, mask=exists, other=0).to(tl.int64)
    ring = rings + layer.to(tl.int64) * ring_layer + tl.load(slots + row).to(tl.int64) * ring_slot
    of_line = ring_index * ring_place + (head * GROUP + member) * ring_head
    q = tl.load(
        ring + of_line[:, None] + dims[None, :], mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0.0
    )  # fmt: skip
    if FORMAT == 0:
        q = q.to(kind.dtype.element_ty)
    elif key_scales is not None:
        scaling *= tl.load(key_scales + layer)
    last = tl.load(last_visible + row * n + token, mask=exists, other=-1)
    stored = entry < entries
    keys, slot = _find(
        entry, stored, kind, addresses, table, pages, start, later, first_block, shared, first + layer, layers,
        cache_block, cache_head, cache_entry, slot_layer, HEADS, SIZE, ALIGNED, EIGHT,
    )  # fmt: skip
    k = load_numbers(keys[None, :], dims[:, None], stored[None, :] & (dims < HEAD_DIM)[:, None], FORMAT)
    k = k.to(q.dtype)
    factor = scaling
    if OWN_SCALES:
        factor = scaling * load_scales(keys, stored, HEAD_DIM)[None, :]
    # Entries since the event are equally far from their positions; kept ones count as just before them.
    position = entry + length - entries
    if PLACED:
        is_packed = entry < tl.minimum(packed, entries)
        bits = tl.load(positions + slot, mask=is_packed, other=0.0).to(tl.int32, bitcast=True)
        position = tl.where(is_packed, bits, position)
    biases = 0.0
    if BIASED:
        biases = tl.load(bias + slot, mask=entry < tl.minimum(packed, entries), other=0.0)
    visible = exists[:, None] & stored[None, :] & (position[None, :] <= last[:, None])
    return seen_logits(q, k, biases, visible, factor, cap, TOKENS, WIDE, BLOCK, LARGEST, BIASED, CAPPED), slot


# Only the dtype of `kind` is used: layers are found by their addresses.
@triton.jit(do_not_specialize=["n", "rows", "first", "layers", "parts"])
def _paged_lse(
    kind, addresses, key_scales, rings, slots, ring_indices, last_visible, bias, positions, block_table, counts,
    event_lengths, firsts, shares, packs, lengths, cache_block, cache_head, cache_entry, ring_layer, ring_slot,
    ring_place, ring_head, table_row, slot_layer, scaling, cap, sinks, n, rows, first, of_group, layers, parts, partial,
    GROUP: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, LEAST_PART: tl.constexpr,
    LARGEST: tl.constexpr, BIASED: tl.constexpr, PLACED: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    ALIGNED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, FORMAT: tl.constexpr,
    OWN_SCALES: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exps of one block of queries over one part of a head; program axes: (head, part, block)."""
    layer, row, head, length, entries, packed, table, first_block, shared, pages, start, later = _place(
        block_table, counts, event_lengths, firsts, shares, packs, lengths, table_row, rows, first, of_group,
        HEADS, HEADS_BLOCK, SIZE,
    )  # fmt: skip
    split, block, part = tl.program_id(1), tl.program_id(2), _part(entries, parts, LEAST_PART, BLOCK)
    member, members = tl.arange(0, ROWS) % (ROWS // TOKENS), 1 if LARGEST else GROUP
    of_row = ((first + layer) * HEADS + head) * members + member
    largest, total = begun(sinks, of_row, member < members, split, ROWS, SINKS)
    for offset in range(split * part, tl.minimum(split * part + part, entries), BLOCK):
        logits, _ = _logits(
            kind, addresses, key_scales, rings, slots, ring_indices, last_visible, bias, positions, layer, row, head,
            length, entries, packed, table, first_block, shared, pages, start, later, block,
            offset + tl.arange(0, BLOCK),
            cache_block, cache_head, cache_entry, ring_layer, ring_slot, ring_place, ring_head, slot_layer, scaling,
            cap, n, first, layers,
            GROUP, WIDE, TOKENS, HEAD_DIM, HEAD_BLOCK, HEADS, SIZE, BLOCK, LARGEST, BIASED, PLACED, ALIGNED,
            CAPPED, FORMAT, OWN_SCALES, EIGHT,
        )  # fmt: skip
        largest, total, _, _ = streamed(largest, total, logits)
    line = (tl.program_id(0).to(tl.int64) * tl.num_programs(2) + block) * ROWS + tl.arange(0, ROWS)
    tl.store(partial + line * PARTS + split, log_sum_exp(largest, total))


@triton.jit(do_not_specialize=["n", "rows", "first", "layers", "parts", "blocks"])
def _add_in_pages(
    kind, addresses, key_scales, rings, slots, ring_indices, last_visible, bias, positions, block_table, counts,
    event_lengths, firsts, shares, packs, lengths, cache_block, cache_head, cache_entry, ring_layer, ring_slot,
    ring_place, ring_head, table_row, slot_layer, scaling, cap, sinks, n, rows, first, of_group, layers, parts, partial,
    column, unwritten, blocks, owns,
    GROUP: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, LEAST_PART: tl.constexpr,
    LARGEST: tl.constexpr, BIASED: tl.constexpr, PLACED: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    ALIGNED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, FORMAT: tl.constexpr,
    OWN_SCALES: tl.constexpr, EIGHT: tl.constexpr,
    OWN: tl.constexpr, MEAN: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Add the attention that one part of a head's entries receives from all queries; program axes: (head, part)."""
    layer, row, head, length, entries, packed, table, first_block, shared, pages, start, later = _place(
        block_table, counts, event_lengths, firsts, shares, packs, lengths, table_row, rows, first, of_group,
        HEADS, HEADS_BLOCK, SIZE,
    )  # fmt: skip
    split, of_part, part = tl.program_id(1), tl.arange(0, PARTS), _part(entries, parts, LEAST_PART, BLOCK)
    written = entries - tl.load(unwritten + row).to(tl.int32)
    for offset in range(split * part, tl.minimum(split * part + part, entries), BLOCK):
        entry = offset + tl.arange(0, BLOCK)
        sums, slot = tl.zeros([NUMBERS, BLOCK], tl.float32), tl.zeros([BLOCK], tl.int64)
        for block in range(0, blocks):
            logits, slot = _logits(
                kind, addresses, key_scales, rings, slots, ring_indices, last_visible, bias, positions, layer, row,
                head, length, entries, packed, table, first_block, shared, pages, start, later, block, entry,
                cache_block, cache_head, cache_entry, ring_layer, ring_slot, ring_place, ring_head, slot_layer,
                scaling, cap, n, first, layers,
                GROUP, WIDE, TOKENS, HEAD_DIM, HEAD_BLOCK, HEADS, SIZE, BLOCK, LARGEST, BIASED, PLACED, ALIGNED,
                CAPPED, FORMAT, OWN_SCALES, EIGHT,
            )  # fmt: skip
            line = (tl.program_id(0).to(tl.int64) * blocks + block) * ROWS + tl.arange(0, ROWS)
            sums += received(logits, partial, line, of_part, parts, PARTS, NUMBERS)
        target = column
        if OWN:
            address = tl.load(owns + 2 * row)
            if address != 0:
                target = address.to(column.dtype)
                slot = ((first + layer) * HEADS + head) * tl.load(owns + 2 * row + 1) + entry
        add_numbers(target, slot, entry < written, entry < entries, sums, GROUP, MEAN, NUMBERS)
