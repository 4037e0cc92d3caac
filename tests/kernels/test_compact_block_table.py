"""A step without what was dropped, against the same row by row and token by token."""

from __future__ import annotations

import pytest
import torch

from keepset.kernels.compact_block_table import shift_step


@pytest.mark.parametrize("size", [16, 32])
def test_what_is_left(implementation: str, size: int) -> None:
    """Prompts, chunks and decoding rows, at and off the edges of blocks, and rows that fill the step up."""
    # Tokens before and after the step, and entries that were dropped.
    rows = [(0, 40, 0), (600, 1200, 0), (100, 101, 64), (100, 101, 63), (96, 97, 1), (1299, 1300, 1187), (47, 80, 33)]
    rows += [(0, 0, 0), (0, 0, 0)]
    draw = torch.Generator().manual_seed(0)
    table = torch.randperm(len(rows) * 100, generator=draw).view(len(rows), 100).int()
    starts = torch.tensor([0, *(after - before for before, after, _ in rows)]).cumsum(0).int()
    tokens = int(starts[-1])
    slots, expected = torch.full((tokens + 3,), -1), torch.full((tokens + 3,), -1)
    for row, (before, after, gone) in enumerate(rows):
        for token, position in zip(range(int(starts[row]), tokens), range(before, after), strict=False):
            there = position - gone % size
            slots[token] = int(table[row, position // size]) * size + position % size
            expected[token] = int(table[row, there // size]) * size + there % size
    left_table, left = torch.zeros(12, 100, dtype=torch.int32), torch.full((12,), 99, dtype=torch.int32)
    addresses = left_table.data_ptr(), left.data_ptr(), slots.data_ptr()
    lengths = torch.tensor([after for _, after, _ in rows], dtype=torch.int32)
    dropped = torch.tensor([gone for _, _, gone in rows])
    shift_step(table, lengths, starts, dropped, slots, size, left_table[: len(rows)], left[: len(rows)])
    assert (left_table.data_ptr(), left.data_ptr(), slots.data_ptr()) == addresses
    assert torch.equal(slots, expected)
    assert left.tolist() == [after - gone for _, after, gone in rows] + [99] * 3
    for row, (_, after, gone) in enumerate(rows):
        blocks = -(-(after - gone) // size)
        assert torch.equal(left_table[row, :blocks], table[row, gone // size : gone // size + blocks])
