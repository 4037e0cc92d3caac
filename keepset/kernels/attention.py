"""Attention over packed entries, where heads may have different lengths, and the new tokens that join them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from keepset.kernels.dispatch import launched_on, uses_triton
from keepset.kernels.int8 import quantize
from keepset.kernels.packed import HeadRun, PackedHeads


def append_entries(
    stores: Sequence[PackedHeads],
    keys: Float[Tensor, "batch kv_heads n head_dim"],
    values: Float[Tensor, "batch kv_heads n value_dim"],
    positions: Int[Tensor, "batch n"],
) -> None:
    """Write `n` new entries into the free places behind those of every head; on a GPU in one launch.

    The heads' counts do not change here.

    Args:
        stores: packed heads with free places. Put one after another they are all heads of all requests.
        keys, values: of the new entries, with any strides.
        positions: of the new tokens.
    """
    if uses_triton(keys.device):
        from keepset.kernels.triton import compaction  # loads Triton

        with launched_on(keys.device):
            compaction.append(stores, keys, values, positions)
        return
    n, first = keys.shape[2], 0
    at = positions[:, None].expand(-1, keys.shape[1], -1).flatten(0, 1)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    for store in stores:
        own = slice(first, first + store.heads)
        first = own.stop
        columns = [(store.positions, at[own])]
        for flat, scale, rows in (
            (store.keys, store.key_scale, keys[own]),
            (store.values, store.value_scale, values[own]),
        ):
            columns += [(flat, rows)] if scale is None else zip((flat, scale), quantize(rows), strict=True)
        for run in store.runs:
            for flat, rows in columns:
                run.behind(flat, n).copy_(rows[run.first : run.first + run.heads])


def ragged_attention(
    queries: Float[Tensor, "batch query_heads n head_dim"],
    stores: Sequence[PackedHeads],
    scaling: float,
    query_positions: Int[Tensor, "batch n"] | None = None,
) -> Float[Tensor, "batch n query_heads value_dim"]:
    """Return the attention of the newest tokens over the entries of their own head.

        output = softmax(queries @ keys' * scaling + bias) @ values

    The query heads that share a KV head are folded into the query axis, so that nothing is repeated or padded. A GPU
    computes all heads in one launch (two if heads are split along their entries), whichever stores hold them. A CPU
    computes one product per run of heads of equal length.

    Args:
        queries: queries of the newest tokens, after rotation.
        stores: packed heads. Put one after another they are all heads of all requests; each store has equally many.
        scaling: factor of the logits.
        query_positions: position of each query. A query then sees the entries up to its own position. If None, each
            query sees all entries.

    Returns:
        The output in the queries' dtype, contiguous.
    """
    if uses_triton(queries.device):
        return _in_triton(queries, stores, scaling, query_positions)[0]
    batch, query_heads, n, head_dim = queries.shape
    runs = _runs(stores)
    kv_heads = runs[-1][2].stop // batch
    group = query_heads // kv_heads
    folded = queries.reshape(batch * kv_heads, group * n, head_dim)
    outputs = []
    for store, run, heads in runs:
        mask = None
        if query_positions is not None:
            last_visible = query_positions.repeat_interleave(kv_heads, 0)[heads]
            mask = run.view(store.positions)[:, None, None, :] <= last_visible[:, None, :, None]
            mask = mask.expand(-1, group, -1, -1).flatten(1, 2)[None]
        if store.bias is not None:
            bias = run.view(store.bias)[None, :, None].to(queries.dtype)
            mask = bias if mask is None else bias.where(mask, float("-inf"))
        keys, values = store.keys_of(run)[None], store.values_of(run)[None]
        outputs.append(F.scaled_dot_product_attention(folded[None, heads], keys, values, mask, scale=scaling)[0])
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.view(batch, query_heads, n, -1).transpose(1, 2).contiguous()


def ragged_log_sum_exp(
    queries: Float[Tensor, "batch query_heads n head_dim"],
    stores: Sequence[PackedHeads],
    scaling: float,
    query_positions: Int[Tensor, "batch n"] | None = None,
) -> Float[Tensor, "batch n query_heads"]:
    """Return the log-sum-exp of each query's logits, by which `ragged_attention` normalises its weights.

    Args:
        queries, stores, scaling, query_positions: as in `ragged_attention`.

    Returns:
        float32; minus infinity for a query that sees no entry.
    """
    if uses_triton(queries.device):
        return _in_triton(queries, stores, scaling, query_positions)[1]
    batch, query_heads, n, _ = queries.shape
    runs = _runs(stores)
    kv_heads = runs[-1][2].stop // batch
    folded = queries.reshape(batch * kv_heads, -1, n, queries.shape[-1])
    rows = []
    for store, run, heads in runs:
        logits = torch.einsum("hgnd,hed->hgne", folded[heads].float(), store.keys_of(run).float()) * scaling
        if store.bias is not None:
            logits += run.view(store.bias).float()[:, None, None]
        if query_positions is not None:
            last_visible = query_positions.repeat_interleave(kv_heads, 0)[heads]
            hidden = run.view(store.positions)[:, None] > last_visible[..., None]
            logits.masked_fill_(hidden[:, None], float("-inf"))
        rows.append(logits.logsumexp(-1))
    return torch.cat(rows).view(batch, query_heads, n).transpose(1, 2)


def _runs(stores: Sequence[PackedHeads]) -> list[tuple[PackedHeads, HeadRun, slice]]:
    """Return each run with its store and the slice of all heads that it covers."""
    runs, first = [], 0
    for store in stores:
        for run in store.pieces:
            runs.append((store, run, slice(first, first + run.heads)))
            first += run.heads
    return runs


def _in_triton(
    queries: Tensor, stores: Sequence[PackedHeads], scaling: float, query_positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the Triton kernel."""
    from keepset.kernels.triton import attention  # loads Triton

    with launched_on(queries.device):
        return attention.ragged_attention(queries, stores, scaling, query_positions)
