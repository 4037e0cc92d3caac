"""Moving entries: all columns of all heads in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from keepset.kernels.packed import HeadTable, PackedHeads

_BLOCK = 32


def pack(
    columns: Sequence[Shaped[Tensor, "batch kv_heads entries ..."]],
    packed: Sequence[Shaped[Tensor, "kept ..."]],
    indices: Int[Tensor, " kept"],
    starts: Int[Tensor, " heads"],
    counts: Int[Tensor, " heads"],
    most: int,
) -> None:
    """Copy every head's chosen entries to the places of their indices.

    Args:
        columns: columns to read, with any strides.
        packed: columns to write, head after head.
        indices: indices of the chosen entries, head after head.
        starts: where each head's indices begin.
        counts: how many indices each head has.
        most: an upper bound of the counts.
    """
    widths = tuple(column.shape[3] if column.ndim == 4 else 1 for column in columns)
    # For each of the four axes the stride of every column.
    strides = [tuple(column.stride(axis) if axis < column.ndim else 1 for column in columns) for axis in range(4)]
    _pack[(len(counts), max(1, triton.cdiv(most, _BLOCK)))](
        tuple(columns), tuple(packed), indices, starts, counts, *strides, columns[0].shape[1],
        WIDTHS=widths, WIDE=tuple(triton.next_power_of_2(width) for width in widths), BLOCK=_BLOCK,
    )  # fmt: skip


def append(
    stores: Sequence[PackedHeads],
    keys: Float[Tensor, "batch kv_heads n head_dim"],
    values: Float[Tensor, "batch kv_heads n value_dim"],
    positions: Int[Tensor, "batch n"],
) -> None:
    """Copy all new entries behind those of their heads.

    Args:
        stores, keys, values, positions: as in `keepset.kernels.compaction.append_entries`.
    """
    batch, kv_heads, n, width = keys.shape
    value_width, table, kind = values.shape[3], HeadTable(stores), stores[0]
    _append[(batch * kv_heads, triton.cdiv(n, _BLOCK))](
        keys, values, positions, kind.keys, kind.values, kind.positions, kind.key_scale, table.addresses,
        table.grown, n,
        kv_heads, batch * kv_heads, *keys.stride(), *values.stride(), *positions.stride(),
        WIDTH=width, WIDE=triton.next_power_of_2(width), VALUE_WIDTH=value_width,
        VALUE_WIDE=triton.next_power_of_2(value_width), BLOCK=_BLOCK, INT8=kind.key_scale is not None,
        ALIGNED=table.aligned,
    )  # fmt: skip


@triton.jit
def _pack(
    columns, packed, indices, starts, counts, of_request, of_head, of_entry, of_number, kv_heads,
    WIDTHS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one block of one head's chosen entries; program axes: (head, block of entries)."""
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, count = tl.load(starts + head).to(tl.int64), tl.load(counts + head)
    moves = row < count
    entry = tl.load(indices + start + row, mask=moves, other=0).to(tl.int64)
    place = start + row
    request, kv_head = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    for column in tl.static_range(len(WIDTHS)):
        dims = tl.arange(0, WIDE[column])
        mask = moves[:, None] & (dims < WIDTHS[column])[None, :]
        source = request * of_request[column] + kv_head * of_head[column] + entry * of_entry[column]
        numbers = tl.load(columns[column] + source[:, None] + (dims * of_number[column])[None, :], mask=mask)
        tl.store(packed[column] + place[:, None] * WIDTHS[column] + dims[None, :], numbers, mask=mask)


# Only the dtypes of `keys_kind` and the like are used: heads are found by the table's addresses.
@triton.jit(do_not_specialize=["grown", "n", "heads"])
def _append(
    keys, values, positions, keys_kind, values_kind, positions_kind, scale_kind, table, grown, n, kv_heads, heads,
    key_request, key_head, key_token, key_dim, value_request, value_head, value_token, value_dim,
    position_request, position_token,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_WIDE: tl.constexpr,
    BLOCK: tl.constexpr, INT8: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copy one block of one head's new entries; program axes: (head, block of tokens)."""
    head = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < n
    request, kv_head, token = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64), token.to(tl.int64)
    stored_keys = tl.load(table + head).to(keys_kind.dtype)
    stored_values = tl.load(table + heads + head).to(values_kind.dtype)
    stored_positions = tl.load(table + 2 * heads + head).to(positions_kind.dtype)
    if ALIGNED:
        stored_keys, stored_values = tl.multiple_of(stored_keys, 16), tl.multiple_of(stored_values, 16)
    place = tl.load(table + 6 * heads + head) + grown + token
    dims = tl.arange(0, WIDE)
    mask = exists[:, None] & (dims < WIDTH)[None, :]
    source = request * key_request + kv_head * key_head + token * key_token
    numbers = tl.load(keys + source[:, None] + (dims * key_dim)[None, :], mask=mask, other=0.0)
    if INT8:
        numbers, scale = _quantized(numbers, scale_kind)
        tl.store(tl.load(table + 4 * heads + head).to(scale_kind.dtype) + place, scale, mask=exists)
    tl.store(stored_keys + place[:, None] * WIDTH + dims[None, :], numbers, mask=mask)
    dims = tl.arange(0, VALUE_WIDE)
    mask = exists[:, None] & (dims < VALUE_WIDTH)[None, :]
    source = request * value_request + kv_head * value_head + token * value_token
    numbers = tl.load(values + source[:, None] + (dims * value_dim)[None, :], mask=mask, other=0.0)
    if INT8:
        numbers, scale = _quantized(numbers, scale_kind)
        tl.store(tl.load(table + 5 * heads + head).to(scale_kind.dtype) + place, scale, mask=exists)
    tl.store(stored_values + place[:, None] * VALUE_WIDTH + dims[None, :], numbers, mask=mask)
    at = tl.load(positions + request * position_request + token * position_token, mask=exists)
    tl.store(stored_positions + place, at.to(stored_positions.dtype.element_ty), mask=exists)


@triton.jit
def _quantized(rows, scale_kind):
    """Quantise rows as `keepset.kernels.int8.quantize` does."""
    rows = rows.to(tl.float32)
    spoilt = tl.min((rows - rows == 0.0).to(tl.int32), 1) == 0
    scale = (tl.where(spoilt, float("nan"), tl.max(tl.abs(rows), 1)) / 127).to(scale_kind.dtype.element_ty)
    step = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
    whole = tl.floor(rows / step[:, None] + 0.5)
    # 8 bits have no NaN: the scale is NaN instead.
    whole = tl.where(spoilt[:, None], 0.0, tl.minimum(tl.maximum(whole, -127.0), 127.0))
    return whole.to(tl.int8), scale
