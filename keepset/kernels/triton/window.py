"""Attention that packed heads receive from a few queries: first log-sum-exps, then the sums of each entry."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from keepset.kernels import dispatch
from keepset.kernels.packed import HeadTable
from keepset.kernels.softmax import GroupReduction
from keepset.kernels.triton.softmax import (
    LEAST_PART,
    add_numbers,
    begun,
    log_sum_exp,
    query_sizes,
    received,
    seen_logits,
    streamed,
)

_PARTS = 16
"""The most parts of a head, for the log-sum-exps of its queries."""


def add_received(column, queries, packed, kv_heads, last_visible, softmax, sums_of) -> None:
    """Compute `keepset.kernels.window.add_received` in two launches, without a host sync.

    Args:
        column, queries, packed, kv_heads, last_visible, softmax, sums_of: as there.
    """
    table = HeadTable([packed])
    columns = packed.keys, packed.positions, packed.bias, packed.key_scale
    where = _Places(*columns, table.addresses, table.grown, packed.longest, queries.shape[3], kv_heads, table.aligned)
    _add(column, queries, where, kv_heads, last_visible, softmax, sums_of)


def received_attention(
    queries, keys, positions, last_visible, softmax, valid, sums_of, bias
) -> Float[Tensor, "heads _ entries"]:
    """Compute `keepset.kernels.window.received_attention` in two launches, without a host sync.

    Args:
        queries, keys, positions, last_visible, softmax, valid, sums_of, bias: as there.
    """
    heads, group, _, _ = queries.shape
    entries = keys.shape[1]
    numbers = sums_of.shape(group)
    column = torch.zeros(heads * entries, *numbers, dtype=torch.float32, device=keys.device)
    if entries:
        keys = keys if keys.stride(2) == 1 else keys.contiguous()
        # An entry that does not exist comes after all queries.
        never = torch.iinfo(positions.dtype).max
        positions = positions.contiguous() if valid is None else positions.masked_fill(~valid, never).contiguous()
        bias = None if bias is None else bias.contiguous()
        columns = (keys, None, positions, bias, None, None)
        starts = torch.arange(heads)
        none = torch.zeros_like(starts)
        addresses = [none if c is None else c.data_ptr() + starts * (c.stride(0) * c.itemsize) for c in columns]
        table = torch.stack([*addresses, torch.full_like(starts, entries)])
        where = _Places(
            keys, positions, bias, None, dispatch.upload(table, keys.device), 0, entries, keys.stride(1), heads,
            aligned=not (table[0] % 16).any(),
        )  # fmt: skip
        # Each head is a request of one head, since it has its own last positions.
        _add(column, queries.to(keys.dtype), where, 1, last_visible, softmax, sums_of)
    return column.view(heads, entries, -1).transpose(1, 2)


class _Places(NamedTuple):
    """Places of heads, as the kernels' arguments.

    Attributes:
        keys, positions, bias, key_scale: columns of which only the dtypes matter; heads are found by the table.
        addresses: the addresses of `HeadTable`.
        grown: entries of every head beyond the table's count.
        longest: entries of the longest head.
        key_row: numbers from one key to the next.
        sink_heads: number of KV heads that a set of sinks covers.
        aligned: whether every head's keys begin at a multiple of 16 bytes.
    """

    keys: Tensor
    positions: Tensor
    bias: Tensor | None
    key_scale: Tensor | None
    addresses: Tensor
    grown: int
    longest: int
    key_row: int
    sink_heads: int
    aligned: bool


def _add(column, queries, where, kv_heads, last_visible, softmax, sums_of) -> None:
    """Add the attention that entries receive to a column.

    A program owns a block of entries and is the only one to add to it, so sums have a fixed order.

    Args:
        column, queries, kv_heads, last_visible, softmax, sums_of: as in `add_received`.
        where: where the heads' entries are.
    """
    largest = sums_of is GroupReduction.LARGEST
    batch, query_heads, n, head_dim = queries.shape
    group, heads = query_heads // kv_heads, batch * kv_heads
    sizes = query_sizes(group, n, head_dim, queries.dtype, largest)
    block, rows, blocks = sizes["BLOCK"], sizes["ROWS"], triton.cdiv(n, sizes["TOKENS"])
    length = -(-max(where.longest, 1) // _PARTS)
    part = max(LEAST_PART, triton.cdiv(length, block) * block)
    parts = triton.cdiv(max(where.longest, 1), part)
    partial = torch.empty(heads, blocks * rows, _PARTS, dtype=torch.float32, device=queries.device)
    sinks = softmax.sinks
    if sinks is not None:  # one for each row of a token
        sinks = sinks.view(where.sink_heads, -1)
        sinks = sinks.amax(1) if largest else sinks.contiguous()
    shared = (
        queries, where.keys, where.positions, where.bias, where.key_scale, where.addresses, last_visible,
        *queries.stride(), *last_visible.stride(), where.key_row, softmax.scaling, softmax.softcap or 1.0, sinks,
        where.sink_heads, where.grown, n, kv_heads, heads,
    )  # fmt: skip
    sizes |= dict(
        BIASED=where.bias is not None, INT8=where.key_scale is not None, ALIGNED=where.aligned, PARTS=_PARTS,
        CAPPED=softmax.softcap is not None, SINKS=sinks is not None,
    )  # fmt: skip
    _window_lse[(heads, parts, blocks)](*shared, partial, part, blocks * rows, **sizes)
    _add_received[(heads, triton.cdiv(max(where.longest, 1), block))](
        *shared, partial, parts, blocks, column, where.positions.data_ptr(), **sizes,
        MEAN=sums_of is GroupReduction.MEAN, NUMBERS=sizes["WIDE"] if sums_of is GroupReduction.EACH else 1,
    )  # fmt: skip


@triton.jit
def _logits(
    queries, keys, positions, bias, key_scale, last_visible, request, kv_head, block, first, length,
    query_batch, query_head, query_token, query_dim, last_batch, last_token, key_row, scaling, cap, n,
    GROUP: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr, BIASED: tl.constexpr, INT8: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Return the logits of a block of queries and a block of entries; those of unseen entries are minus infinity."""
    row, dims = tl.arange(0, TOKENS * WIDE), tl.arange(0, HEAD_BLOCK)
    token, member = (block * TOKENS + row // WIDE).to(tl.int64), row % WIDE
    exists = (token < n) & (member < GROUP)
    of_row = (
        request.to(tl.int64) * query_batch + (kv_head * GROUP + member).to(tl.int64) * query_head + token * query_token
    )
    q = tl.load(
        queries + of_row[:, None] + dims[None, :] * query_dim,
        mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    last = tl.load(last_visible + request.to(tl.int64) * last_batch + token * last_token, mask=exists, other=-1)
    entry = first + tl.arange(0, BLOCK)
    stored, entry_row = entry < length, entry.to(tl.int64)
    k = tl.load(
        keys + entry_row[None, :] * key_row + dims[:, None],
        mask=stored[None, :] & (dims < HEAD_DIM)[:, None], other=0.0,
    )  # fmt: skip
    if INT8:
        steps = tl.load(key_scale + entry_row, mask=stored, other=0.0).to(tl.float32)
        k = (k.to(tl.float32) * steps[None, :]).to(q.dtype)
    biases = tl.load(bias + entry_row, mask=stored, other=0.0) if BIASED else 0.0
    at = tl.load(positions + entry_row, mask=stored, other=0)
    visible = exists[:, None] & stored[None, :] & (at[None, :] <= last[:, None])
    return seen_logits(q, k, biases, visible, scaling, cap, TOKENS, WIDE, BLOCK, LARGEST, BIASED, CAPPED)


@triton.jit(do_not_specialize=["last_batch", "sink_heads", "grown", "n", "heads", "part", "rows"])
def _window_lse(
    queries, keys_kind, positions_kind, bias_kind, scale_kind, table, last_visible,
    query_batch, query_head, query_token, query_dim, last_batch, last_token, key_row,
    scaling, cap, sinks, sink_heads, grown, n, kv_heads, heads, partial, part, rows,
    GROUP: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr, BIASED: tl.constexpr, INT8: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exps of one block of queries over one part of a head; program axes: (head, part, block)."""
    head, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys = tl.load(table + head).to(keys_kind.dtype)
    if ALIGNED:
        keys = tl.multiple_of(keys, 16)
    positions = tl.load(table + 2 * heads + head).to(positions_kind.dtype)
    bias = tl.load(table + 3 * heads + head).to(bias_kind.dtype) if BIASED else 0
    key_scale = tl.load(table + 4 * heads + head).to(scale_kind.dtype) if INT8 else 0
    length = tl.load(table + 6 * heads + head).to(tl.int32) + grown
    member, members = tl.arange(0, ROWS) % (ROWS // TOKENS), 1 if LARGEST else GROUP
    largest, total = begun(sinks, (head % sink_heads) * members + member, member < members, split, ROWS, SINKS)
    for first in range(split * part, tl.minimum((split + 1) * part, length), BLOCK):
        logits = _logits(
            queries, keys, positions, bias, key_scale, last_visible, head // kv_heads, head % kv_heads, block, first,
            length, query_batch, query_head, query_token, query_dim, last_batch, last_token, key_row, scaling, cap, n,
            GROUP, WIDE, TOKENS, HEAD_DIM, HEAD_BLOCK, BLOCK, LARGEST, BIASED, INT8, CAPPED,
        )  # fmt: skip
        largest, total, _, _ = streamed(largest, total, logits)
    row = head.to(tl.int64) * rows + block * ROWS + tl.arange(0, ROWS)
    tl.store(partial + row * PARTS + split, log_sum_exp(largest, total))


@triton.jit(do_not_specialize=["last_batch", "sink_heads", "grown", "n", "heads", "parts", "blocks"])
def _add_received(
    queries, keys_kind, positions_kind, bias_kind, scale_kind, table, last_visible,
    query_batch, query_head, query_token, query_dim, last_batch, last_token, key_row,
    scaling, cap, sinks, sink_heads, grown, n, kv_heads, heads, partial, parts, blocks, column, first_position,
    GROUP: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr, BIASED: tl.constexpr, INT8: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    MEAN: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Add the attention of all queries to one block of a head's entries; program axes: (head, block of entries)."""
    head, first = tl.program_id(0), tl.program_id(1) * BLOCK
    length = tl.load(table + 6 * heads + head).to(tl.int32) + grown
    if first >= length:
        return
    keys = tl.load(table + head).to(keys_kind.dtype)
    if ALIGNED:
        keys = tl.multiple_of(keys, 16)
    address = tl.load(table + 2 * heads + head)
    positions = address.to(positions_kind.dtype)
    bias = tl.load(table + 3 * heads + head).to(bias_kind.dtype) if BIASED else 0
    key_scale = tl.load(table + 4 * heads + head).to(scale_kind.dtype) if INT8 else 0
    sums, part = tl.zeros([NUMBERS, BLOCK], tl.float32), tl.arange(0, PARTS)
    for block in range(0, blocks):
        logits = _logits(
            queries, keys, positions, bias, key_scale, last_visible, head // kv_heads, head % kv_heads, block, first,
            length, query_batch, query_head, query_token, query_dim, last_batch, last_token, key_row, scaling, cap, n,
            GROUP, WIDE, TOKENS, HEAD_DIM, HEAD_BLOCK, BLOCK, LARGEST, BIASED, INT8, CAPPED,
        )  # fmt: skip
        row = (head.to(tl.int64) * blocks + block) * ROWS + tl.arange(0, ROWS)
        sums += received(logits, partial, row, part, parts, PARTS, NUMBERS)
    entry = first + tl.arange(0, BLOCK)
    # All columns have the same places, so the address of the head's first position gives the head's first place.
    begin = (address - first_position) // (positions_kind.dtype.element_ty.primitive_bitwidth // 8)
    stored = entry < length
    add_numbers(column, begin + entry, stored, stored, sums, GROUP, MEAN, NUMBERS)
