"""Packed heads in 4 bits: attention over them, and appending new entries.

Two neighbouring numbers of a row share a byte, so even and odd numbers are loaded apart, and a product of rows is the
sum of two products. The newest entries have a residual, whose products are added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from keepset.kernels.entry_format import levels_and_borders
from keepset.kernels.packed import HeadTable, PackedHeads
from keepset.kernels.triton.attention import Launch, masked, query_rows, sight
from keepset.kernels.triton.softmax import begun, streamed

_MOVED = 16
"""New tokens that a program writes."""


def _residuals(stores: Sequence[PackedHeads]) -> tuple[Int[Tensor, "7 heads"], int]:
    """Return `addresses` and `grown` of a `HeadTable` of the stores' residuals; heads without one have no entries."""
    parts = [store.residual for store in stores]
    present = [part for part in parts if part is not None]
    if len(present) == len(parts):
        table = HeadTable(present)
        return table.addresses, table.grown
    joined = []
    for store, part in zip(stores, parts, strict=True):
        addresses = torch.zeros(7, store.heads, dtype=torch.int64) if part is None else part.host_table.clone()
        addresses[-1] += 0 if part is None else part.grown
        joined.append(addresses)
    return torch.cat(joined, 1).to(stores[0].keys.device, non_blocking=True), 0


def ragged_attention(queries, stores, softmax, query_positions) -> Float[Tensor, "batch n query_heads value_dim"]:
    """Compute `keepset.kernels.attention.ragged_attention` of mixed queries; the output is also mixed.

    Args:
        queries: mixed.
        stores, softmax, query_positions: as there.
    """
    launch, kind = Launch(queries, stores, softmax, query_positions), stores[0]
    residuals, residuals_grown = _residuals(stores)
    _attend_four_bits[launch.grid](
        queries, kind.keys, kind.positions, launch.bias, kind.key_scale, levels_and_borders(queries.device)[0],
        launch.table.addresses, residuals, launch.last_visible, launch.sinks, launch.partial, launch.partial_lse,
        *queries.stride(), softmax.scaling, softmax.softcap or 1.0, launch.part, launch.table.grown, residuals_grown,
        queries.shape[2], launch.kv_heads, launch.heads, launch.lse.numel(),
        HALF=queries.shape[3] // 2, VALUE_HALF=launch.output.shape[3] // 2, HALF_BLOCK=max(16, launch.head_block // 2),
        VALUE_BLOCK=max(16, launch.value_block // 2), **launch.sizes, num_stages=2,
    )  # fmt: skip
    return launch.merged()


def append(stores, keys, values, positions) -> None:
    """Append mixed new entries to their heads, and write their rounding errors to the residuals.

    Args:
        stores, positions: as in `keepset.kernels.attention.append_entries`.
        keys, values: mixed.
    """
    table, (residuals, residuals_grown), kind = HeadTable(stores), _residuals(stores), stores[0]
    batch, kv_heads, n, size = keys.shape
    value_size = values.shape[3]
    levels, borders = levels_and_borders(keys.device)
    _append_four_bits[(batch * kv_heads, triton.cdiv(n, _MOVED))](
        keys, values, positions, kind.keys, kind.positions, kind.key_scale, levels, borders,
        table.addresses, residuals, table.grown, residuals_grown, n, kv_heads, batch * kv_heads,
        *keys.stride(), *values.stride(), *positions.stride(),
        HALF=size // 2, WIDE=triton.next_power_of_2(size // 2), VALUE_HALF=value_size // 2,
        VALUE_WIDE=triton.next_power_of_2(value_size // 2), BLOCK=_MOVED,
    )  # fmt: skip


@triton.jit
def _halves(codes, levels, dtype: tl.constexpr):
    """Return the levels of the lower and of the upper halves of bytes.

    Args:
        codes: bytes with two codes each.
        levels: the number of each code.
        dtype: of the result.
    """
    low, high = tl.load(levels + (codes & 15).to(tl.int32)), tl.load(levels + (codes >> 4).to(tl.int32))
    return low.to(dtype), high.to(dtype)


@triton.jit
def _products(even, odd, rows, scales, entry_row, dims, stored, levels, HALF: tl.constexpr):
    """Return the products of queries with the keys at some places, `[queries, places]`.

    Args:
        even, odd: numbers of the queries, `[queries, dims]`.
        rows, scales: pointers to the head's keys and their scales.
        entry_row: index of each entry.
        dims: which bytes of a key.
        stored: which entries exist.
        levels: the number of each code.
        HALF: bytes of a key.
    """
    mask = stored[None, :] & (dims < HALF)[:, None]
    codes = tl.load(rows + entry_row[None, :] * HALF + dims[:, None], mask=mask, other=0)
    low, high = _halves(codes, levels, even.dtype)
    products = tl.dot(even, low, input_precision="ieee") + tl.dot(odd, high, input_precision="ieee")
    return products * tl.load(scales + entry_row, mask=stored, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _weighted(weights, rows, scales, entry_row, dims, stored, levels, dtype: tl.constexpr, HALF: tl.constexpr):
    """Return the weighted sums of the values at some places: their even and their odd numbers.

    Args:
        weights: `[queries, entries]`.
        rows, scales: pointers to the head's values and their scales.
        entry_row, dims, stored, levels, HALF: as in `_products`.
        dtype: of the products.
    """
    mask = stored[:, None] & (dims < HALF)[None, :]
    codes = tl.load(rows + entry_row[:, None] * HALF + dims[None, :], mask=mask, other=0)
    low, high = _halves(codes, levels, dtype)
    weights = (weights * tl.load(scales + entry_row, mask=stored, other=0.0).to(tl.float32)[None, :]).to(dtype)
    return tl.dot(weights, low, input_precision="ieee"), tl.dot(weights, high, input_precision="ieee")


# Only the dtypes of `rows_kind` and the like are used: heads are found by the tables' addresses.
@triton.jit(do_not_specialize=["part", "grown", "residuals_grown", "n", "heads", "outputs"])
def _attend_four_bits(
    queries, rows_kind, positions_kind, bias_kind, scale_kind, levels, table, residuals, query_positions, sinks,
    output, lse, query_batch, query_head, query_token, query_dim,
    scaling, cap, part, grown, residuals_grown, n, kv_heads, heads, outputs,
    GROUP: tl.constexpr, HALF: tl.constexpr, VALUE_HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend one block of rows over one part of a head; program axes: (head and block of rows, part).

    A row is one query head of one token; the tokens are innermost.
    """
    head, request, row, query, token = query_rows(heads, kv_heads, n, GROUP, ROWS)
    split, exists = tl.program_id(1), row < GROUP * n
    dims, value_dims = tl.arange(0, HALF_BLOCK), tl.arange(0, VALUE_BLOCK)
    of_row = queries + request.to(tl.int64) * query_batch + query * query_head + token * query_token
    query_mask = exists[:, None] & (dims < HALF)[None, :]
    even = tl.load(of_row[:, None] + (2 * dims * query_dim)[None, :], mask=query_mask, other=0.0)
    odd = tl.load(of_row[:, None] + ((2 * dims + 1) * query_dim)[None, :], mask=query_mask, other=0.0)
    keys, values = tl.load(table + head).to(rows_kind.dtype), tl.load(table + heads + head).to(rows_kind.dtype)
    key_scale = tl.load(table + 4 * heads + head).to(scale_kind.dtype)
    value_scale = tl.load(table + 5 * heads + head).to(scale_kind.dtype)
    length = tl.load(table + 6 * heads + head).to(tl.int32) + grown
    lost_keys = tl.load(residuals + head).to(rows_kind.dtype)
    lost_values = tl.load(residuals + heads + head).to(rows_kind.dtype)
    lost_key_scale = tl.load(residuals + 4 * heads + head).to(scale_kind.dtype)
    lost_value_scale = tl.load(residuals + 5 * heads + head).to(scale_kind.dtype)
    # The newest entries have a residual.
    plain = length - tl.load(residuals + 6 * heads + head).to(tl.int32) - residuals_grown
    last_visible, positions, bias, biased = sight(
        query_positions, request * n + token, exists, positions_kind, bias_kind, table, head, heads, length,
        CAUSAL, BIASED,
    )  # fmt: skip
    largest, total = begun(sinks, query, exists, split, ROWS, SINKS)
    of_even, of_odd = tl.zeros([ROWS, VALUE_BLOCK], tl.float32), tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    first = split * part
    for offset in range(first, tl.minimum(first + part, length), BLOCK):
        entry = offset + tl.arange(0, BLOCK)
        stored = entry < length
        entry_row, lost = entry.to(tl.int64), (entry - plain).to(tl.int64)
        refined = stored & (lost >= 0)
        logits = _products(even, odd, keys, key_scale, entry_row, dims, stored, levels, HALF)
        if offset + BLOCK > plain:
            logits += _products(even, odd, lost_keys, lost_key_scale, lost, dims, refined, levels, HALF)
        logits *= scaling
        logits = masked(logits, entry, stored, last_visible, positions, bias, biased, cap, CAUSAL, BIASED, CAPPED)
        largest, total, weights, shrink = streamed(largest, total, logits)
        new_even, new_odd = _weighted(
            weights, values, value_scale, entry_row, value_dims, stored, levels, even.dtype, VALUE_HALF
        )
        if offset + BLOCK > plain:
            more_even, more_odd = _weighted(
                weights, lost_values, lost_value_scale, lost, value_dims, refined, levels, even.dtype, VALUE_HALF
            )
            new_even += more_even
            new_odd += more_odd
        of_even, of_odd = of_even * shrink[:, None] + new_even, of_odd * shrink[:, None] + new_odd
    # A row that sees nothing gives zero; NaN stays NaN.
    total = tl.where(total == 0.0, 1.0, total)
    at_output = (request.to(tl.int64) * n + token) * (kv_heads * GROUP) + query
    at_part = split.to(tl.int64) * outputs + at_output
    tl.store(lse + at_part, largest + tl.log(total), mask=exists)
    # For a part beyond its head's end only the log-sum-exp is written.
    written = tl.where(first < tl.maximum(length, 1), GROUP * n, 0)
    target = output + at_part[:, None] * (2 * VALUE_HALF) + 2 * value_dims[None, :]
    mask = (row < written)[:, None] & (value_dims < VALUE_HALF)[None, :]
    tl.store(target, (of_even / total[:, None]).to(output.dtype.element_ty), mask=mask)
    tl.store(target + 1, (of_odd / total[:, None]).to(output.dtype.element_ty), mask=mask)


@triton.jit
def _coded(even, odd, dims, levels, borders, scale_kind, HALF: tl.constexpr):
    """Return rows as `FourBits.quantize` stores them, their scales, and the rounding errors of both halves.

    Args:
        even, odd: numbers of rows in float32, zero beyond `HALF`.
        dims: which bytes of a row.
        levels, borders: the number of each code, and those between them.
        scale_kind: a pointer of the scales' type.
        HALF: bytes of a row.
    """
    spread = tl.sqrt((tl.sum(even * even, 1) + tl.sum(odd * odd, 1)) / (2 * HALF))
    spoilt = (spread - spread) != 0.0
    step = tl.where(spoilt, 1.0, tl.maximum(spread, 1.1754944e-38))[:, None]
    code, odd_code = tl.zeros(even.shape, tl.int32), tl.zeros(odd.shape, tl.int32)
    for i in tl.static_range(15):
        border = tl.load(borders + i)
        code += (even / step > border).to(tl.int32)
        odd_code += (odd / step > border).to(tl.int32)
    in_row = (dims < HALF)[None, :]
    level, other_level = tl.load(levels + code), tl.load(levels + odd_code)
    level, other_level = tl.where(in_row, level, 0.0), tl.where(in_row, other_level, 0.0)
    scale = tl.sum(even * level + odd * other_level, 1) / tl.sum(level * level + other_level * other_level, 1)
    scale = tl.where(spoilt, float("nan"), scale).to(scale_kind.dtype.element_ty)
    # The rows as attention reads them.
    read = scale_kind.dtype.element_ty
    step = scale.to(tl.float32)[:, None]
    lost = even - level.to(read).to(tl.float32) * step
    other_lost = odd - other_level.to(read).to(tl.float32) * step
    return (code | (odd_code << 4)).to(tl.uint8), scale, lost, other_lost


@triton.jit
def _write_rows(
    rows, head_offset, token, token_stride, dim_stride, exists, dims, which, table, residuals, entry_row, lost_row,
    head, heads, rows_kind, scale_kind, levels, borders, HALF: tl.constexpr,
):  # fmt: skip
    """Write new keys (`which` is 0) or values (1) of a head, and their residuals."""
    mask = exists[:, None] & (dims < HALF)[None, :]
    source = rows + head_offset + token[:, None] * token_stride + (2 * dims * dim_stride)[None, :]
    even = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(source + dim_stride, mask=mask, other=0.0).to(tl.float32)
    codes, scale, lost, other_lost = _coded(even, odd, dims, levels, borders, scale_kind, HALF)
    target = tl.load(table + which * heads + head).to(rows_kind.dtype)
    tl.store(target + entry_row[:, None] * HALF + dims[None, :], codes, mask=mask)
    tl.store(tl.load(table + (4 + which) * heads + head).to(scale_kind.dtype) + entry_row, scale, mask=exists)
    codes, scale, _, _ = _coded(lost, other_lost, dims, levels, borders, scale_kind, HALF)
    target = tl.load(residuals + which * heads + head).to(rows_kind.dtype)
    tl.store(target + lost_row[:, None] * HALF + dims[None, :], codes, mask=mask)
    tl.store(tl.load(residuals + (4 + which) * heads + head).to(scale_kind.dtype) + lost_row, scale, mask=exists)


# Only the dtypes of `rows_kind` and the like are used: heads are found by the tables' addresses.
@triton.jit(do_not_specialize=["grown", "residuals_grown", "n", "heads"])
def _append_four_bits(
    keys, values, positions, rows_kind, positions_kind, scale_kind, levels, borders, table, residuals, grown,
    residuals_grown, n, kv_heads, heads,
    key_request, key_head, key_token, key_dim, value_request, value_head, value_token, value_dim,
    position_request, position_token,
    HALF: tl.constexpr, WIDE: tl.constexpr, VALUE_HALF: tl.constexpr, VALUE_WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one block of one head's new entries; program axes: (head, block of tokens)."""
    head = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < n
    request, kv_head, token = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64), token.to(tl.int64)
    entry_row = tl.load(table + 6 * heads + head) + grown + token
    lost_row = tl.load(residuals + 6 * heads + head) + residuals_grown + token
    _write_rows(
        keys, request * key_request + kv_head * key_head, token, key_token, key_dim, exists, tl.arange(0, WIDE), 0,
        table, residuals, entry_row, lost_row, head, heads, rows_kind, scale_kind, levels, borders, HALF,
    )  # fmt: skip
    _write_rows(
        values, request * value_request + kv_head * value_head, token, value_token, value_dim, exists,
        tl.arange(0, VALUE_WIDE), 1,
        table, residuals, entry_row, lost_row, head, heads, rows_kind, scale_kind, levels, borders, VALUE_HALF,
    )  # fmt: skip
    at = tl.load(positions + request * position_request + token * position_token, mask=exists)
    at = at.to(positions_kind.dtype.element_ty)
    tl.store(tl.load(table + 2 * heads + head).to(positions_kind.dtype) + entry_row, at, mask=exists)
    tl.store(tl.load(residuals + 2 * heads + head).to(positions_kind.dtype) + lost_row, at, mask=exists)
