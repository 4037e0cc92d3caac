"""Rows times a mixing matrix or its inverse: one launch, for rows of any dtype and strides."""

from __future__ import annotations

import triton
import triton.language as tl

_ROWS = 32
"""Rows of a program; few, because a decoded token has few rows."""
_COLUMNS, _INPUTS = 128, 32
"""The most numbers that a program computes of each row, and the numbers that it multiplies at a time."""


def times(rows, matrix, output) -> None:
    """Write each row times the matrix to `output`, which is contiguous. Sums are float32.

    Args:
        rows: `[*places, size]`, with any strides.
        matrix: `[size, size]` in float32, with any strides.
        output: as `rows`.
    """
    size = rows.shape[-1]
    if rows.ndim > 4:
        rows = rows.reshape(-1, size)
    missing = 4 - rows.ndim
    (_, second, third, _), strides = (1,) * missing + rows.shape, (0,) * missing + rows.stride()
    number, columns = rows.numel() // size, min(_COLUMNS, max(16, triton.next_power_of_2(size)))
    if number:
        _times[(triton.cdiv(number, _ROWS), triton.cdiv(size, columns))](
            rows, matrix, output, *strides, *matrix.stride(), number, second, third,
            SIZE=size, ROWS=_ROWS, COLUMNS=columns, INPUTS=_INPUTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["number", "second", "third"])
def _times(
    rows, matrix, output, of_first, of_second, of_third, of_number, of_input, of_column, number, second, third,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply one block of rows with one block of columns; program axes: (rows, columns)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < number
    source = rows + row // third // second * of_first + row // third % second * of_second + row % third * of_third
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, SIZE, INPUTS):
        inner = begin + tl.arange(0, INPUTS)
        numbers = tl.load(
            source[:, None] + (inner * of_number)[None, :], mask=exists[:, None] & (inner < SIZE)[None, :], other=0.0
        )
        part = tl.load(
            matrix + (inner * of_input)[:, None] + (column * of_column)[None, :],
            mask=(inner < SIZE)[:, None] & (column < SIZE)[None, :], other=0.0,
        )  # fmt: skip
        # Tensor cores compute float32 products in three parts, which is much faster for long prompts than plain ones.
        sums += tl.dot(numbers.to(tl.float32), part, input_precision="tf32x3")
    tl.store(
        output + (row * SIZE)[:, None] + column[None, :], sums.to(output.dtype.element_ty),
        mask=exists[:, None] & (column < SIZE)[None, :],
    )  # fmt: skip
