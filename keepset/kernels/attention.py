"""Packed heads of different lengths: attention over them, appending new entries, and packing those that stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from keepset.kernels.dispatch import launched_on, uses_triton
from keepset.kernels.packed import PackedHeads
from keepset.kernels.softmax import Softmax, softmax_attention


def append_entries(
    stores: Sequence[PackedHeads],
    keys: Float[Tensor, "batch kv_heads n head_dim"],
    values: Float[Tensor, "batch kv_heads n value_dim"],
    positions: Int[Tensor, "batch n"],
) -> None:
    """Append `n` new entries to every head, in its free places; on a GPU in one launch.

    The heads' counts are not updated.

    Args:
        stores: packed heads with free places; concatenated, they are all heads of all requests.
        keys, values: keys and values of the new entries, with any strides.
        positions: positions of the new tokens.
    """
    format = stores[0].format
    if stores[0].in_triton:
        from keepset.kernels.triton import attention, four_bits  # loads Triton

        with launched_on(keys.device):
            rows = (format.mix(keys), format.mix(values)) if format else (keys, values)
            append = four_bits.append if format and format.refined else attention.append
            append(stores, *rows, positions)
        return
    at = positions[:, None].expand(-1, keys.shape[1], -1).flatten(0, 1)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    first = 0
    for store in stores:
        store_heads = slice(first, first + store.heads)
        first = store_heads.stop
        new_keys, new_values = keys[store_heads], values[store_heads]
        if format:
            new_keys, new_values = format.mix(new_keys), format.mix(new_values)
        _write(store, new_keys, new_values, at[store_heads])


def _write(
    store: PackedHeads, keys: Float[Tensor, "heads n _"], values: Float[Tensor, "heads n _"], at: Int[Tensor, "heads n"]
) -> None:
    columns, lost = [(store.positions, at)], []
    for flat, scale, rows in ((store.keys, store.key_scale, keys), (store.values, store.value_scale, values)):
        if store.format is None or scale is None:
            columns.append((flat, rows))
            continue
        stored, factor = store.format.quantize(rows, scale.dtype)
        columns += [(flat, stored), (scale, factor)]
        if store.residual is not None:
            lost.append(rows - store.format.dequantize(stored, factor))
    for run in store.runs:
        for flat, rows in columns:
            run.view(flat, run.count, at.shape[1]).copy_(rows[run.first : run.first + run.heads])
    if store.residual is not None:
        lost_keys, lost_values = lost
        _write(store.residual, lost_keys, lost_values, at)


def ragged_attention(
    queries: Float[Tensor, "batch query_heads n head_dim"],
    stores: Sequence[PackedHeads],
    softmax: Softmax,
    query_positions: Int[Tensor, "batch n"] | None = None,
) -> Float[Tensor, "batch n query_heads value_dim"]:
    """Return the attention of the newest tokens over the entries of their own head.

        output = softmax(queries @ keys' * scaling + bias) @ values

    with the caps and sinks of a model that has them.

    The query heads that share a KV head are folded into the query axis, so that nothing is repeated or padded. A GPU
    computes all heads in one launch (two if heads are split along their entries), whichever stores hold them. A CPU
    computes one product per run of heads of equal length.

    Args:
        queries: queries of the newest tokens, after rotation.
        stores: packed heads, equally many in each; concatenated, they are all heads of all requests.
        query_positions: position of each query. A query then sees the entries up to its own position. If None, each
            query sees all entries.

    Returns:
        The output in the queries' dtype, contiguous.
    """
    format = stores[0].format
    if stores[0].in_triton:
        from keepset.kernels.triton import attention, four_bits  # loads Triton

        with launched_on(queries.device):
            if not format:
                return attention.ragged_attention(queries, stores, softmax, query_positions)
            attend = four_bits.ragged_attention if format.refined else attention.ragged_attention
            return format.unmix(attend(format.mix(queries), stores, softmax, query_positions))
    if format:
        queries = format.mix(queries)
    batch, query_heads, n, head_dim = queries.shape
    kv_heads = len(stores) * stores[0].heads // batch
    group = query_heads // kv_heads
    folded = queries.reshape(batch * kv_heads, group * n, head_dim)
    sinks = None if softmax.sinks is None else softmax.by_query_group(batch, kv_heads).sinks
    outputs: list[Tensor] = []
    first = 0
    for store in stores:
        for run in store.pieces:
            heads = slice(first, first + run.heads)
            first = heads.stop
            mask = None
            if query_positions is not None:
                last_visible = query_positions.repeat_interleave(kv_heads, 0)[heads]
                mask = run.view(store.positions)[:, None, None, :] <= last_visible[:, None, :, None]
                mask = mask.expand(-1, group, -1, -1).flatten(1, 2)[None]
            if store.bias is not None:
                bias = run.view(store.bias)[None, :, None].to(queries.dtype)
                mask = bias if mask is None else bias.where(mask, float("-inf"))
            head_queries, keys, values = (
                folded[None, heads],
                store.rows(run, "keys")[None],
                store.rows(run, "values")[None],
            )
            if softmax.softcap is None and sinks is None:
                attended = F.scaled_dot_product_attention(head_queries, keys, values, mask, scale=softmax.scaling)
            else:
                head_softmax = replace(softmax, sinks=None if sinks is None else sinks[heads].repeat_interleave(n, 1))
                attended = (
                    softmax_attention(head_queries, keys, values, head_softmax, mask)[0].transpose(1, 2).contiguous()
                )
            outputs.append(attended[0])
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if format:
        output = format.unmix(output)
    return output.reshape(batch, query_heads, n, -1).transpose(1, 2).contiguous()


def pack_entries(
    columns: Mapping[str, Shaped[Tensor, "batch kv_heads entries ..."]],
    indices: Int[Tensor, " kept"],
    counts: Int[Tensor, "batch kv_heads"],
) -> dict[str, Shaped[Tensor, "kept ..."]]:
    """Return the chosen entries of every head, head after head; on a GPU one launch moves all columns of all heads.

        packed[starts[h] + i] = column[h // kv_heads, h % kv_heads, indices[starts[h] + i]]

    Args:
        columns: columns of entries, with any strides; keys and values are usually transposed views.
        indices: indices of the chosen entries, head after head.
    """
    heads = counts.flatten()
    if not uses_triton(indices.device):
        rows = torch.repeat_interleave(torch.arange(len(heads), device=indices.device), heads, output_size=len(indices))
        flat_indices = cache(lambda capacity: rows * capacity + indices)  # a store's columns share a capacity
        return {name: _pick(column, rows, indices, flat_indices) for name, column in columns.items()}
    packed = {name: column.new_empty(len(indices), *column.shape[3:]) for name, column in columns.items()}
    if packed and len(indices):
        from keepset.kernels.triton import attention  # loads Triton

        starts = heads.cumsum(0) - heads
        most = min(len(indices), *(column.shape[2] for column in columns.values()))  # a bound, without a host sync
        with launched_on(indices.device):
            attention.pack(list(columns.values()), list(packed.values()), indices, starts, heads, most)
    return packed


def _pick(
    column: Shaped[Tensor, "batch kv_heads entries ..."],
    rows: Int[Tensor, " kept"],
    indices: Int[Tensor, " kept"],
    flat_indices: Callable[[int], Int[Tensor, " kept"]],
) -> Shaped[Tensor, "kept ..."]:
    """Return `column[rows, indices]`, gathered row by row.

    Every memory order is read in place, because flattening would copy entries that are about to be dropped.
    `flat_indices` returns `rows * capacity + indices` for a given capacity.

    Args:
        column: with any strides.
        rows: the head of each entry, counted over the batch.
        indices: of the entries in their heads.
        flat_indices: returns `rows * capacity + indices` for a given capacity.
    """
    batch, heads, entries = column.shape[:3]
    of_request, of_head, of_entry = column.stride()[:3]
    if of_head >= entries * of_entry > 0 and of_request == heads * of_head and of_head % of_entry == 0:
        capacity = of_head // of_entry
        last = (batch * heads - 1) * capacity + entries
        flat = column.as_strided((last, *column.shape[3:]), column.stride()[2:])
        return flat.index_select(0, flat_indices(capacity))
    swapped = column.transpose(1, 2)
    if swapped.is_contiguous():
        request, head = rows // heads, rows % heads
        return swapped.reshape(batch * entries * heads, *column.shape[3:]).index_select(
            0, (request * entries + indices) * heads + head
        )
    return column.reshape(batch * heads * entries, *column.shape[3:]).index_select(0, flat_indices(entries))
