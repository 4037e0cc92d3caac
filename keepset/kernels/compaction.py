"""Entries that move: what an event keeps is packed, and new tokens join what is packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from keepset.kernels.dispatch import launched_on, uses_triton
from keepset.kernels.int8 import quantize
from keepset.kernels.packed import PackedHeads


def pack_entries(
    columns: Mapping[str, Shaped[Tensor, "batch kv_heads entries ..."]],
    indices: Int[Tensor, " kept"],
    counts: Int[Tensor, "batch kv_heads"],
) -> dict[str, Shaped[Tensor, "kept ..."]]:
    """Every head's chosen entries, head after head; on a GPU all columns of all heads in one launch.

    Args:
        columns: with any strides: keys and values usually arrive as a transposed view.
        indices: the chosen entries, head after head.
        counts: how many each head keeps.
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


def append_entries(
    stores: Sequence[PackedHeads],
    keys: Float[Tensor, "batch kv_heads n head_dim"],
    values: Float[Tensor, "batch kv_heads n value_dim"],
    positions: Int[Tensor, "batch n"],
) -> None:
    """Writes `n` new entries behind those of every head, which are not counted yet; on a GPU in one launch.

    Args:
        stores: one after another all heads of all requests, with free places.
        keys, values: of the new entries; any strides.
        positions: of the new tokens.
    """
    if uses_triton(keys.device):
        from keepset.kernels.triton import compaction  # loads Triton

        with launched_on(keys.device):
            compaction.append(stores, keys, values, positions)
        return
    n, first = keys.shape[2], 0
    at = positions[:, None].expand(-1, keys.shape[1], -1)
    columns = [column.flatten(0, 1) for column in (keys, values, at)]
    for store in stores:
        own = columns if len(stores) == 1 else [column[first : first + store.heads] for column in columns]
        first += store.heads
        new = [
            *_as_stored(store.keys, store.key_scale, own[0]),
            *_as_stored(store.values, store.value_scale, own[1]),
            (store.positions, own[2]),
        ]
        for run in store.runs:
            for flat, rows in new:
                run.behind(flat, n).copy_(rows[run.first : run.first + run.heads])


def _as_stored(flat: Tensor, scale: Tensor | None, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Columns, and what of these rows comes into them."""
    return [(flat, rows)] if scale is None else list(zip((flat, scale), quantize(rows), strict=True))


def _pick(
    column: Shaped[Tensor, "batch kv_heads entries ..."], rows: Int[Tensor, " kept"], indices: Int[Tensor, " kept"]
) -> Shaped[Tensor, "kept ..."]:
    """`column[rows, indices]`, gathered row by row.

    All orders are read in place, because flattening would copy what is about to be dropped.
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
