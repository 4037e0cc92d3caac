"""Attention over heads of any lengths in an engine's pages, split along the entries, and writing new entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from keepset.kernels import dispatch
from keepset.kernels.dispatch import DEVICE_BLOCK
from keepset.kernels.page_format import PageFormat
from keepset.kernels.page_layout import PagedTokens, PageLayout
from keepset.kernels.triton.attention import _MERGED, _merge_parts
from keepset.kernels.triton.page_entries import as_bytes, kind_of, load_numbers, load_scales, store_rows
from keepset.kernels.triton.softmax import LEAST_PART, PROGRAMS_PER_PROCESSOR, begun, capped, rows_of, streamed

_SPLITS = 8, 64
"""The least and the most parts of a long head; at least some, because other heads of the step may be far shorter."""
_MOST_NUMBERS = 2**14
"""The most numbers of a program's queries, so that they fit its memory."""


def attend(queries, cache, addresses, layer, tokens, layout, softmax, output, bias, format, value_dim) -> None:
    """Compute `keepset.kernels.paged.paged_attention`.

    The number of a head's parts depends on the number of tokens and `tokens.longest`; their length on the head's
    entries, which only the device knows.

    Args:
        queries, layer, tokens, layout, softmax, output, bias, format, value_dim: as there.
        cache: of the layer that attends.
        addresses: of the group's caches.
    """
    n, (_, query_heads, head_dim) = len(tokens.lengths), queries.shape
    _, heads, size, entry = cache.shape
    if not n:
        return
    group, kind = query_heads // heads, as_bytes(cache, format)
    half, width = (entry // 2, head_dim) if value_dim is None else (0, value_dim)
    head_block, value_block = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, width))
    block = rows_of(head_block, queries.dtype)
    # Each block of a KV head's query heads reads its entries again.
    rows = max(16, min(triton.next_power_of_2(group), _MOST_NUMBERS // head_block))
    row_blocks = triton.cdiv(group, rows)
    splits = _splits(queries.device, n * heads * row_blocks, tokens.longest, n * query_heads * width)
    partial, lse = output, None
    if splits > 1:
        partial = torch.empty(splits, n, query_heads, width, dtype=torch.float32, device=queries.device)
        lse = torch.empty(splits, n, query_heads, dtype=torch.float32, device=queries.device)
    sinks = softmax.sinks
    _attend_pages[(n, heads * row_blocks, splits)](
        queries, kind, addresses.on_device, *_scales(format), bias, sinks,
        *_places(tokens, layout), partial, lse, *queries.stride()[:2], *cache.stride()[:3], *_rows(tokens, layout),
        layer, len(addresses.on_device), 0 if bias is None else bias.stride(0), softmax.scaling,
        softmax.softcap or 1.0, n * query_heads,
        GROUP=group, HEADS=heads, HEADS_BLOCK=triton.next_power_of_2(heads), HEAD_DIM=head_dim,
        HEAD_BLOCK=head_block, VALUE_DIM=width, VALUE_BLOCK=value_block, SIZE=size, ROWS=rows, ROW_BLOCKS=row_blocks,
        BLOCK=block, LEAST_PART=LEAST_PART,
        LISTED=tokens.rows is not None, BIASED=bias is not None, SPLIT=splits > 1,
        ALIGNED=addresses.aligned, HALF=half, CAPPED=softmax.softcap is not None,
        SINKS=sinks is not None, **kind_of(format),
    )  # fmt: skip
    if splits > 1:
        _merge_parts[(n * query_heads,)](
            partial, lse, output, None, tokens.places, n * query_heads, splits, query_heads,
            VALUE_DIM=width, VALUE_BLOCK=triton.next_power_of_2(width), BLOCK=_MERGED,
            LISTED=tokens.places is not None,
        )  # fmt: skip


def append(keys, values, cache, tokens, layout, format) -> None:
    """Compute `keepset.kernels.paged.append_to_pages`.

    Args:
        keys, values, cache, tokens, layout, format: as there, with rows mixed if the format mixes them.
    """
    n, (_, heads, head_dim), size = len(tokens.lengths), keys.shape, cache.shape[2]
    if not n:
        return
    _append_to_pages[(n,)](
        keys, values, as_bytes(cache, format), *_scales(format), tokens.slots, *_places(tokens, layout),
        *keys.stride()[:2], *values.stride()[:2], *cache.stride()[:3], *_rows(tokens, layout),
        HEADS=heads, HEADS_BLOCK=triton.next_power_of_2(heads), HEAD_DIM=head_dim,
        HEAD_BLOCK=triton.next_power_of_2(head_dim), SIZE=size, LISTED=tokens.rows is not None,
        GUARDED=tokens.slots is not None, HALF=cache.shape[3] // 2, **kind_of(format),
    )  # fmt: skip


def follow(filed, block_table, before, after, required, lost, block_size, layout, drafts) -> Int[Tensor, " rows"]:
    """Compute `keepset.kernels.paged.follow_layouts`.

    Args:
        filed, block_table, before, after, required, lost, block_size, layout, drafts: as there.
    """
    rows, (_, layers, heads) = len(before), filed.layout.counts.shape
    pages = torch.empty(rows, dtype=torch.int64, device=block_table.device)
    _follow[(rows,)](
        block_table, before, after, required, *filed.layout, filed.tokens, *layout, pages, lost, block_table.stride(0),
        COUNTS=layers * heads, LAYERS=layers, SIZE=block_size, DRAFTS=drafts, BLOCK=128, num_warps=1,
    )  # fmt: skip
    return pages


def _splits(device: torch.device, programs: int, longest: int, numbers: int) -> int:
    """Return the parts of every head: enough to keep the device busy, each long enough to be worth a program.

    A step of many tokens gets fewer parts, because the engine does not account for the memory of partial outputs.

    Args:
        device: where it runs.
        programs: how many there are without parts.
        longest: an upper bound of a head's entries.
        numbers: of the step's output.
    """
    least, most = _SPLITS
    even = triton.cdiv(dispatch.processors(device) * PROGRAMS_PER_PROCESSOR, programs)
    worth = min(triton.cdiv(longest, LEAST_PART), max(least, min(most, even)))
    return max(1, min(worth, DEVICE_BLOCK // numbers))


def _scales(format: PageFormat | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the layer's scales of keys and values; None if rows have their own."""
    return (None, None) if format is None else (format.key_scale, format.value_scale)


def _places(tokens: PagedTokens, layout: PageLayout) -> tuple[Tensor | None, ...]:
    return tokens.block_table, *layout, tokens.places, tokens.rows, tokens.lengths


def _rows(tokens: PagedTokens, layout: PageLayout) -> tuple[int, ...]:
    return tokens.block_table.stride(0), *(part.stride(0) for part in layout)


@triton.jit
def _dealt(counts, shared, HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Return for each head its entries and pages at the event, and its first page numbers: at the event and after it.

    This is `keepset.kernels.page_layout._numbers` for one request.

    Args:
        counts: pointer to the entries of each head at the event.
        shared: whether pages are shared.
        HEADS, HEADS_BLOCK: KV heads, and the next power of two.
        SIZE: entries of a page.
    """
    head = tl.arange(0, HEADS_BLOCK)
    count = tl.load(counts + head, mask=head < HEADS, other=0).to(tl.int32)
    kept = (count + SIZE - 1) // SIZE
    free = kept * SIZE - count
    if shared:
        kept, free = tl.maximum(kept - 1, 0), free * 0
    # Heads with fewer free places fill up earlier; if equal, the lower head takes its page first.
    full = tl.where(head < HEADS, free * HEADS + head, 2**30)
    rank = tl.sum((full[None, :] < full[:, None]).to(tl.int32), 1)
    start = tl.sum(tl.where(head[None, :] < head[:, None], kept[None, :], 0), 1)
    total = tl.sum(kept, 0)
    if shared:
        total = total * 0
    return count, kept, start, total + rank - kept * HEADS


@triton.jit
def _dealt_to(counts, shared, head, HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, SIZE: tl.constexpr):
    count, kept, start, later = _dealt(counts, shared, HEADS, HEADS_BLOCK, SIZE)
    is_head = tl.arange(0, HEADS_BLOCK) == head
    count, kept = tl.sum(tl.where(is_head, count, 0), 0), tl.sum(tl.where(is_head, kept, 0), 0)
    return count, kept, tl.sum(tl.where(is_head, start, 0), 0), tl.sum(tl.where(is_head, later, 0), 0)


@triton.jit
def _number(page, kept, start, later, HEADS: tl.constexpr):
    return tl.where(page < kept, start + page, later + page * HEADS)


@triton.jit
def _find(
    entry, stored, kind, addresses, table, kept, start, later, first_block, shared, layer, layers,
    cache_block, cache_head, cache_entry, slot_layer,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Return pointers to a head's entries, and their slots.

    Args:
        entry: index of each entry in its head.
        stored: which entries exist.
        kind, addresses: a cache of the right type, and where each layer's begins.
        table: pointer to the request's blocks.
        kept, start, later: what `_dealt_to` has returned.
        first_block, shared: of the layout.
        layer, layers: the layer, and how many share the block table.
        cache_block, cache_head, cache_entry: strides of a cache.
        slot_layer: slots of a layer.
        HEADS, SIZE: KV heads, and entries of a page.
        ALIGNED, EIGHT: what divides addresses and strides.
    """
    page = entry // SIZE
    number = _number(page, kept, start, later, HEADS)
    index, holder = first_block + number // HEADS, page * 0 + layer
    if shared > 0:
        # Shared pages are numbered through all layers.
        elsewhere = page < kept
        number = tl.where(elsewhere, number + shared - 1, number)
        index = tl.where(elsewhere, number // (HEADS * layers), index)
        holder = tl.where(elsewhere, number // HEADS % layers, holder)
    block = tl.load(table + index, mask=stored, other=0).to(tl.int64)
    at = block * cache_block + (number % HEADS) * cache_head + (entry % SIZE) * cache_entry
    numbers = tl.load(addresses + holder).to(kind.dtype)
    if ALIGNED:
        numbers = tl.multiple_of(numbers, 16)
    if EIGHT:
        at = tl.multiple_of(at, 8)
    slot = holder.to(tl.int64) * slot_layer + (block * HEADS + number % HEADS) * SIZE + entry % SIZE
    return numbers + at, slot


@triton.jit(do_not_specialize=["layer", "outputs"])
def _attend_pages(
    queries, cache, caches, key_scale, value_scale, bias, sinks, block_table, counts, event_lengths, firsts, shares,
    token_indices, rows, lengths, output, lse,
    query_token, query_head, cache_block, cache_head, cache_entry,
    table_row, counts_row, event_row, first_row, shared_row, layer, layers, bias_layer, scaling, cap, outputs,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr, ROW_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, LEAST_PART: tl.constexpr,
    LISTED: tl.constexpr, BIASED: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr,
    HALF: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    FORMAT: tl.constexpr, OWN_SCALES: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Attend query heads of one token and KV head over one part.

    Program axes: (token, KV head and block of its query heads, part).
    """
    token, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1) // ROW_BLOCKS, tl.program_id(2)
    token_index, row = token, token
    if LISTED:
        token_index, row = tl.load(token_indices + token).to(tl.int64), tl.load(rows + token).to(tl.int64)
    length = tl.load(lengths + token).to(tl.int32)
    shared = tl.load(shares + row * shared_row).to(tl.int32)
    count, kept, start, later = _dealt_to(counts + row * counts_row, shared > 0, head, HEADS, HEADS_BLOCK, SIZE)
    since = length - tl.load(event_lengths + row * event_row).to(tl.int32)
    entries = tl.where(length > 0, count + since, 0)
    first_block = tl.load(firsts + row * first_row).to(tl.int32)
    table = block_table + row * table_row
    member = tl.program_id(1) % ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
    exists, query = member < GROUP, head * GROUP + member
    dims, value_dims = tl.arange(0, HEAD_BLOCK), tl.arange(0, VALUE_BLOCK)
    q = tl.load(
        queries + token_index * query_token + query[:, None] * query_head + dims[None, :],
        mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    if FORMAT == 0:
        q = q.to(cache.dtype.element_ty)
    elif key_scale is not None:
        scaling *= tl.load(key_scale)
    largest, total = begun(sinks, query, exists, split, ROWS, SINKS)
    attended = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    part = entries
    if SPLIT:
        even = tl.cdiv(entries, tl.num_programs(2))
        part = tl.maximum(LEAST_PART, tl.cdiv(even, BLOCK) * BLOCK)
    for offset in range(split * part, tl.minimum(split * part + part, entries), BLOCK):
        entry = offset + tl.arange(0, BLOCK)
        stored = entry < entries
        numbers, slot = _find(
            entry, stored, cache, caches, table, kept, start, later, first_block, shared, layer, layers,
            cache_block, cache_head, cache_entry, bias_layer, HEADS, SIZE, ALIGNED, EIGHT,
        )  # fmt: skip
        k = load_numbers(numbers[None, :], dims[:, None], stored[None, :] & (dims < HEAD_DIM)[:, None], FORMAT)
        logits = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scaling
        if OWN_SCALES:
            logits *= load_scales(numbers, stored, HEAD_DIM)[None, :]
        if CAPPED:
            logits = capped(logits, cap)
        if BIASED:
            # Entries since the event have no bias.
            logits += tl.load(bias + slot, mask=stored & (entry < count), other=0.0).to(tl.float32)[None, :]
        logits = tl.where(stored[None, :], logits, float("-inf"))
        largest, total, weights, shrink = streamed(largest, total, logits)
        numbers += HALF
        real = stored[:, None] & (value_dims < VALUE_DIM)[None, :]
        v = load_numbers(numbers[:, None], value_dims[None, :], real, FORMAT)
        if OWN_SCALES:
            weights *= load_scales(numbers, stored, HEAD_DIM)[None, :]
        v = v.to(q.dtype)
        attended = attended * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
    # A row that sees nothing gives zero; NaN stays NaN.
    total = tl.where(total == 0.0, 1.0, total)
    attended = attended / total[:, None]
    if value_scale is not None:
        attended *= tl.load(value_scale)
    written = GROUP
    if SPLIT:
        at_output = split.to(tl.int64) * outputs + token * (HEADS * GROUP) + query
        tl.store(lse + at_output, largest + tl.log(total), mask=exists)
        # For a part beyond its head's end only the log-sum-exp is written.
        written = tl.where(split * part < tl.maximum(entries, 1), GROUP, 0)
    else:
        at_output = token_index * (HEADS * GROUP) + query
    tl.store(
        output + at_output[:, None] * VALUE_DIM + value_dims[None, :],
        attended.to(output.dtype.element_ty), mask=(member < written)[:, None] & (value_dims < VALUE_DIM)[None, :],
    )  # fmt: skip


@triton.jit
def _append_to_pages(
    keys, values, cache, key_scale, value_scale, slots, block_table, counts, event_lengths, firsts, shares,
    token_indices, rows, lengths, key_token, key_head, value_token, value_head, cache_block, cache_head, cache_entry,
    table_row, counts_row, event_row, first_row, shared_row,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    SIZE: tl.constexpr, LISTED: tl.constexpr, GUARDED: tl.constexpr,
    HALF: tl.constexpr, FORMAT: tl.constexpr, OWN_SCALES: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Write one token's entries of all heads; one program for each token."""
    token = tl.program_id(0).to(tl.int64)
    token_index, row = token, token
    if LISTED:
        token_index, row = tl.load(token_indices + token).to(tl.int64), tl.load(rows + token).to(tl.int64)
    length = tl.load(lengths + token).to(tl.int32)
    if GUARDED:
        length = tl.where(tl.load(slots + token) < 0, 0, length)
    exists, block, block_head, offset = _newest(
        length, block_table + row * table_row, counts + row * counts_row, event_lengths + row * event_row,
        firsts + row * first_row, shares + row * shared_row, HEADS, HEADS_BLOCK, SIZE,
    )  # fmt: skip
    head, dims = tl.arange(0, HEADS_BLOCK), tl.arange(0, HEAD_BLOCK)
    at = block * cache_block + block_head * cache_head + offset * cache_entry
    if EIGHT:
        at = tl.multiple_of(at, 8)
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    k = tl.load(keys + token_index * key_token + head[:, None] * key_head + dims[None, :], mask=mask, other=0.0)
    store_rows(cache + at, k, key_scale, exists, dims, HEAD_DIM, FORMAT, OWN_SCALES)
    v = tl.load(values + token_index * value_token + head[:, None] * value_head + dims[None, :], mask=mask, other=0.0)
    store_rows(cache + at + HALF, v, value_scale, exists, dims, HEAD_DIM, FORMAT, OWN_SCALES)


@triton.jit
def _newest(
    length, table, counts, event_length, first, shared, HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Return for each head whether a token's entry is written to it, and the entry's block, head and offset.

    Args:
        length: tokens of the request, with the new one; 0 to write nothing.
        table: pointer to the request's blocks.
        counts, event_length, first, shared: pointers to its layout.
        HEADS, HEADS_BLOCK: KV heads, and the next power of two.
        SIZE: entries of a page.
    """
    count, kept, start, later = _dealt(counts, tl.load(shared) > 0, HEADS, HEADS_BLOCK, SIZE)
    entry = count + (length - tl.load(event_length).to(tl.int32)) - 1
    number = _number(entry // SIZE, kept, start, later, HEADS)
    exists = tl.arange(0, HEADS_BLOCK) < tl.where(length > 0, HEADS, 0)
    index = tl.load(first).to(tl.int32) + number // HEADS
    return exists, tl.load(table + index, mask=exists, other=0).to(tl.int64), number % HEADS, entry % SIZE


@triton.jit
def _follow(
    block_table, before, after, required, filed_counts, filed_lengths, filed_firsts, filed_shares, filed_tokens,
    counts, lengths, firsts, shares, pages, lost, table_row,
    COUNTS: tl.constexpr, LAYERS: tl.constexpr, SIZE: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move the layout of one request; one program for each request."""
    row = tl.program_id(0).to(tl.int64)
    had, has, blocks = tl.load(before + row), tl.load(after + row), block_table + row * table_row
    old = tl.load(blocks + tl.maximum(had - 1, 0) // SIZE).to(tl.int64)
    must, tokens = tl.load(required + row) != 0, tl.load(filed_tokens + old)
    is_filed = must & (tokens - DRAFTS <= had) & (had <= tokens)
    lane = tl.arange(0, BLOCK)
    for offset in tl.static_range(0, COUNTS, BLOCK):
        index = offset + lane
        count = tl.load(filed_counts + old * COUNTS + index, mask=index < tl.where(is_filed, COUNTS, 0), other=0)
        tl.store(counts + row * COUNTS + index, count, mask=index < COUNTS)
        for taken_back in tl.static_range(0, DRAFTS + SIZE, SIZE):
            page = tl.load(blocks + tl.maximum(has - 1 - taken_back, had) // SIZE).to(tl.int64)
            tl.store(filed_counts + page * COUNTS + index, count, mask=index < COUNTS)
    for offset in tl.static_range(0, LAYERS, BLOCK):
        index = offset + lane
        source = old * LAYERS + index
        length = tl.load(filed_lengths + source, mask=index < tl.where(is_filed, LAYERS, 0), other=0)
        first = tl.load(filed_firsts + source, mask=index < tl.where(is_filed, LAYERS, 0), other=0)
        shared = tl.load(filed_shares + source, mask=index < tl.where(is_filed, LAYERS, 0), other=0)
        tl.store(lengths + row * LAYERS + index, length, mask=index < LAYERS)
        tl.store(firsts + row * LAYERS + index, first, mask=index < LAYERS)
        tl.store(shares + row * LAYERS + index, shared, mask=index < LAYERS)
        for taken_back in tl.static_range(0, DRAFTS + SIZE, SIZE):
            page = tl.load(blocks + tl.maximum(has - 1 - taken_back, had) // SIZE).to(tl.int64)
            target = page * LAYERS + index
            tl.store(filed_lengths + target, length, mask=index < LAYERS)
            tl.store(filed_firsts + target, first, mask=index < LAYERS)
            tl.store(filed_shares + target, shared, mask=index < LAYERS)
    tl.debug_barrier()  # all threads have read what was filed before it is overwritten
    for taken_back in tl.static_range(0, DRAFTS + SIZE, SIZE):
        page = tl.load(blocks + tl.maximum(has - 1 - taken_back, had) // SIZE)
        tl.store(filed_tokens + page, has.to(tl.int32))
    tl.store(pages + row, tl.load(blocks + (has - 1) // SIZE).to(tl.int64))
    if must & ~is_filed:
        tl.store(lost, 1)


_SHIFTED = 512


def shift_step(block_table, lengths, starts, dropped, slots, block_size, left_table, left) -> None:
    """Compute `keepset.kernels.paged.shift_step`.

    Args:
        block_table, lengths, starts, dropped, slots, block_size, left_table, left: as there.
    """
    _shift[(len(lengths),)](
        block_table, lengths, starts, dropped, slots, left_table, left,
        block_table.stride(0), left_table.stride(0), block_size, BLOCK=_SHIFTED,
    )  # fmt: skip


@triton.jit
def _shift(
    block_table, lengths, starts, dropped, slots, left_table, left, of_row, of_left_row, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill one row of the table, and move the slots of its new tokens."""
    row = tl.program_id(0).to(tl.int64)
    length, gone = tl.load(lengths + row).to(tl.int64), tl.load(dropped + row).to(tl.int64)
    tl.store(left + row, (length - gone).to(left.dtype.element_ty))
    table = block_table + row * of_row
    # A padding row gets one block that belongs to no request.
    blocks = tl.maximum((length - gone + size - 1) // size, 1)
    for first in range(0, blocks, BLOCK):
        column = first + tl.arange(0, BLOCK)
        exists = column < blocks
        numbers = tl.load(table + gone // size + column, mask=exists)
        tl.store(left_table + row * of_left_row + column, numbers, mask=exists)
    shift = gone % size
    if shift > 0:
        end = tl.load(starts + row + 1).to(tl.int64)
        for first in range(tl.load(starts + row).to(tl.int64), end, BLOCK):
            token = first + tl.arange(0, BLOCK)
            new = token < end
            entry_index = length - end + token - shift
            block = tl.load(table + entry_index // size, mask=new).to(tl.int64)
            tl.store(slots + token, block * size + entry_index % size, mask=new)
