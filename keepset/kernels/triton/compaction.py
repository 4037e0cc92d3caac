"""Entries that move, all columns of all heads in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from jaxtyping import Int, Shaped
from torch import Tensor

from keepset.kernels.packed import HeadTable

_BLOCK = 32


def pack(
    columns: Sequence[Shaped[Tensor, "batch kv_heads entries ..."]],
    packed: Sequence[Shaped[Tensor, "kept ..."]],
    indices: Int[Tensor, " kept"],
    starts: Int[Tensor, " heads"],
    counts: Int[Tensor, " heads"],
    most: int,
) -> None:
    """Copies every head's chosen entries to its places, which are where its indices are."""
    _copy[(len(counts), max(1, triton.cdiv(most, _BLOCK)))](
        tuple(columns), tuple(packed), indices, starts, counts, 0, 0, *_strides(columns), columns[0].shape[1],
        WIDTHS=_widths(columns), WIDE=_wide(columns), BLOCK=_BLOCK, CHOSEN=True,
    )  # fmt: skip


def append(
    packed: Sequence[Shaped[Tensor, "places ..."]],
    new: Sequence[Shaped[Tensor, "batch kv_heads n ..."]],
    table: HeadTable,
) -> None:
    """Copies all new entries behind those of their heads."""
    n = new[0].shape[2]
    _copy[(len(table.starts), triton.cdiv(n, _BLOCK))](
        tuple(new), tuple(packed), table.starts, table.starts, table.counts, table.grown, n, *_strides(new),
        new[0].shape[1], WIDTHS=_widths(new), WIDE=_wide(new), BLOCK=_BLOCK, CHOSEN=False,
    )  # fmt: skip


def _strides(columns: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Of each of the first three axes, column by column, and of a row's numbers."""
    return tuple(tuple(column.stride(axis) if axis < column.ndim else 1 for column in columns) for axis in range(4))


def _widths(columns: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(column.shape[3] if column.ndim == 4 else 1 for column in columns)


def _wide(columns: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(triton.next_power_of_2(width) for width in _widths(columns))


@triton.jit(do_not_specialize=["grown", "n"])
def _copy(
    columns, packed, indices, starts, counts, grown, n, of_request, of_head, of_entry, of_number, kv_heads,
    WIDTHS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, count = tl.load(starts + head).to(tl.int64), tl.load(counts + head)
    if CHOSEN:
        moves = row < count
        entry = tl.load(indices + start + row, mask=moves, other=0).to(tl.int64)
        place = start + row
    else:
        moves = row < n
        entry = row.to(tl.int64)
        place = start + count + grown + row
    request, kv_head = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    for column in tl.static_range(len(WIDTHS)):
        dims = tl.arange(0, WIDE[column])
        mask = moves[:, None] & (dims < WIDTHS[column])[None, :]
        source = request * of_request[column] + kv_head * of_head[column] + entry * of_entry[column]
        numbers = tl.load(columns[column] + source[:, None] + (dims * of_number[column])[None, :], mask=mask)
        tl.store(packed[column] + place[:, None] * WIDTHS[column] + dims[None, :], numbers, mask=mask)
