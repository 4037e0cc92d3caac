"""Attention over entries that are stored packed, heads of different lengths side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from keepset.kernels.dispatch import uses_triton
from keepset.kernels.packed import PackedHeads


def ragged_attention(
    queries: Float[Tensor, "batch query_heads n head_dim"],
    packed: PackedHeads,
    kv_heads: int,
    scaling: float,
    query_positions: Int[Tensor, "batch n"] | None = None,
) -> Float[Tensor, "batch n query_heads value_dim"]:
    """Attention of the newest tokens over their own head's entries.

    The query group of a KV head is folded into the query axis: nothing is repeated and nothing padded. On a GPU all
    heads are one launch, split along their entries; on a CPU a run per head costs less than padding to the longest.

    Args:
        queries: of the newest tokens, after rotation.
        packed: all heads of all requests.
        kv_heads: KV heads of one request.
        scaling: of the logits.
        query_positions: every query then sees the entries up to its own position; without them it sees all.

    Returns:
        The output in the queries' precision, contiguous.
    """
    if uses_triton(queries.device):
        return _in_triton(queries, packed, scaling, query_positions)[0]
    batch, query_heads, n, head_dim = queries.shape
    group = query_heads // kv_heads
    folded = queries.reshape(batch * kv_heads, group * n, head_dim)
    outputs = []
    for run in packed.runs:
        heads = slice(run.first, run.first + run.heads)
        mask = None
        if query_positions is not None:
            last_visible = query_positions.repeat_interleave(kv_heads, 0)[heads]
            mask = run.view(packed.positions)[:, None, None, :] <= last_visible[:, None, :, None]
            mask = mask.expand(-1, group, -1, -1).flatten(1, 2)[None]
        if packed.bias is not None:
            bias = run.view(packed.bias)[None, :, None].to(queries.dtype)
            mask = bias if mask is None else bias.where(mask, float("-inf"))
        keys, values = run.view(packed.keys)[None], run.view(packed.values)[None]
        outputs.append(F.scaled_dot_product_attention(folded[None, heads], keys, values, mask, scale=scaling)[0])
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.view(batch, query_heads, n, -1).transpose(1, 2).contiguous()


def ragged_log_sum_exp(
    queries: Float[Tensor, "batch query_heads n head_dim"],
    packed: PackedHeads,
    kv_heads: int,
    scaling: float,
    query_positions: Int[Tensor, "batch n"] | None = None,
) -> Float[Tensor, "batch n query_heads"]:
    """What `ragged_attention` normalises each query's weights by, float32; of nothing seen it is minus infinity."""
    if uses_triton(queries.device):
        return _in_triton(queries, packed, scaling, query_positions)[1]
    batch, query_heads, n, _ = queries.shape
    folded = queries.reshape(batch * kv_heads, -1, n, queries.shape[-1])
    rows = []
    for run in packed.runs:
        heads = slice(run.first, run.first + run.heads)
        logits = torch.einsum("hgnd,hed->hgne", folded[heads].float(), run.view(packed.keys).float()) * scaling
        if packed.bias is not None:
            logits += run.view(packed.bias).float()[:, None, None]
        if query_positions is not None:
            last_visible = query_positions.repeat_interleave(kv_heads, 0)[heads]
            hidden = run.view(packed.positions)[:, None] > last_visible[..., None]
            logits.masked_fill_(hidden[:, None], float("-inf"))
        rows.append(logits.logsumexp(-1))
    return torch.cat(rows).view(batch, query_heads, n).transpose(1, 2)


def _in_triton(
    queries: Tensor, packed: PackedHeads, scaling: float, query_positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    from keepset.kernels.triton import attention  # loads Triton

    return attention.ragged_attention(queries, packed, scaling, query_positions)
