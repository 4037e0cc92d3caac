"""Packing the entries that an event keeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from keepset.kernels.dispatch import launched_on, uses_triton


def pack_entries(
    columns: Mapping[str, Shaped[Tensor, "batch kv_heads entries ..."]],
    indices: Int[Tensor, " kept"],
    counts: Int[Tensor, "batch kv_heads"],
) -> dict[str, Shaped[Tensor, "kept ..."]]:
    """Return the chosen entries of every head, head after head; on a GPU one launch moves all columns of all heads.

        packed[starts[h] + i] = column[h // kv_heads, h % kv_heads, indices[starts[h] + i]]

    Args:
        columns: columns of entries, with any strides: keys and values usually are a transposed view.
        indices: indices of the chosen entries, head after head.
        counts: how many entries each head keeps.

    Returns:
        Every column's chosen rows.
    """
    heads = counts.flatten()
    if not uses_triton(indices.device):
        rows = torch.repeat_interleave(torch.arange(len(heads), device=indices.device), heads, output_size=len(indices))
        return {name: _pick(column, rows, indices) for name, column in columns.items()}
    packed = {name: column.new_empty(len(indices), *column.shape[3:]) for name, column in columns.items()}
    if packed and len(indices):
        from keepset.kernels.triton import compaction  # loads Triton

        starts = heads.cumsum(0) - heads
        most = min(len(indices), *(column.shape[2] for column in columns.values()))  # the device is not asked
        with launched_on(indices.device):
            compaction.pack(list(columns.values()), list(packed.values()), indices, starts, heads, most)
    return packed


def _pick(
    column: Shaped[Tensor, "batch kv_heads entries ..."], rows: Int[Tensor, " kept"], indices: Int[Tensor, " kept"]
) -> Shaped[Tensor, "kept ..."]:
    """Return `column[rows, indices]`, gathered row by row.

    Every memory order is read in place: flattening would copy the entries that are about to be dropped.
    """
    batch, heads, entries = column.shape[:3]
    of_request, of_head, of_entry = column.stride()[:3]
    if of_head > entries * of_entry > 0 and of_request == heads * of_head and of_head % of_entry == 0:
        capacity = of_head // of_entry
        places = (batch * heads - 1) * capacity + entries
        flat = column.as_strided((places, *column.shape[3:]), column.stride()[2:])
        return flat.index_select(0, rows * capacity + indices)
    swapped = column.transpose(1, 2)
    if not column.is_contiguous() and swapped.is_contiguous():
        request, head = rows // heads, rows % heads
        return swapped.reshape(batch * entries * heads, *column.shape[3:]).index_select(
            0, (request * entries + indices) * heads + head
        )
    return column.reshape(batch * heads * entries, *column.shape[3:]).index_select(0, rows * entries + indices)
