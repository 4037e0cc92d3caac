"""The step without dropped entries: one program for each row."""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

_BLOCK = 512


def shift_step(
    block_table: Int[Tensor, "rows width"],
    lengths: Int[Tensor, " rows"],
    starts: Int[Tensor, " rows_plus_1"],
    dropped: Int[Tensor, " rows"],
    slots: Int[Tensor, " tokens"],
    block_size: int,
    left_table: Int[Tensor, "rows width"],
    left: Int[Tensor, " rows"],
) -> None:
    """Compute `keepset.kernels.compact_block_table.shift_step`.

    Args:
        block_table, lengths, starts, dropped, slots, block_size, left_table, left: as there.
    """
    _shift[(len(lengths),)](
        block_table, lengths, starts, dropped, slots, left_table, left,
        block_table.stride(0), left_table.stride(0), block_size, BLOCK=_BLOCK,
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
    # A padding row has one block, which belongs to no request.
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
            place = length - end + token - shift
            block = tl.load(table + place // size, mask=new).to(tl.int64)
            tl.store(slots + token, block * size + place % size, mask=new)
