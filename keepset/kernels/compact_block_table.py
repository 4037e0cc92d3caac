"""The engine's step without dropped entries, for requests whose heads have all lost equally many."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.kernels.dispatch import launched_on, uses_triton


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
    """Fill `left_table` and `left` with the blocks and numbers of entries that are left; on a GPU in one launch.

    What is left of a request lies in its blocks from the first block that is not free. New tokens' slots move, in
    place, to where the request's entries end.

    Args:
        block_table: blocks by logical position.
        lengths: tokens of each request after the step.
        starts: the first query of each row, and the end of the last row's.
        dropped: entries that each request has lost.
        slots: slot mapping of the new tokens by logical position; written to. A slot moves within its block or to the
            block before.
        block_size: tokens of a block.
        left_table: blocks that are left; written to. Columns beyond a row's blocks hold anything.
        left: entries that are left; written to.
    """
    if uses_triton(block_table.device):
        from keepset.kernels.triton import compact_block_table  # loads Triton

        with launched_on(block_table.device):
            compact_block_table.shift_step(block_table, lengths, starts, dropped, slots, block_size, left_table, left)
        return
    left.copy_(lengths - dropped)
    columns = torch.arange(block_table.shape[1], device=block_table.device) + (dropped // block_size)[:, None]
    left_table.copy_(block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1)))
    tokens = torch.arange(len(slots), device=slots.device)
    row = torch.searchsorted(starts[1:].to(tokens), tokens, right=True).clamp(max=len(lengths) - 1)
    place = lengths[row] - starts[row + 1] + tokens - dropped[row] % block_size
    moves = (dropped[row] % block_size > 0) & (tokens < starts[-1])
    place = place.where(moves, 0)
    moved = block_table[row, place // block_size].to(slots) * block_size + place % block_size
    slots.copy_(moved.where(moves, slots))
