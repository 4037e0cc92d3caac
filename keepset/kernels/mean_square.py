"""The mean square of the attention that entries receive from queries that come after all of them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.kernels.blocks import CACHE_BLOCK, block_size
from keepset.kernels.columns import ColumnStatistic, attention_columns
from keepset.kernels.dispatch import uses_triton


def mean_square_attention(
    queries: Float[Tensor, "query_heads n head_dim"], keys: Float[Tensor, "kv_heads entries head_dim"], scaling: float
) -> Float[Tensor, "query_heads entries"]:
    """Return the mean square of the attention that each entry receives from `n` queries that see all entries.

        A = softmax(queries @ keys' * scaling)     result = (A * A).mean(queries)

    Attention is made in blocks of queries: memory grows with the entries, time with `n` times the entries.

    Args:
        queries: queries rotated to positions after all entries.
        keys: keys of all entries, after rotation.
        scaling: factor of the logits.

    Returns:
        float32, whatever the dtype of the inputs; zero if there are no queries.
    """
    if not keys.shape[1] or not queries.shape[1]:
        return torch.zeros(len(queries), keys.shape[1], device=keys.device)
    if uses_triton(keys.device):
        asking, square = queries.to(keys.dtype), ColumnStatistic.SQUARE
        columns = attention_columns(asking, keys, scaling=scaling, names=[square], causal=False)
        return columns[square] / queries.shape[1]
    kv_heads, entries, _ = keys.shape
    grouped = queries.unflatten(0, (kv_heads, -1))
    group, n = grouped.shape[1:3]
    rows = max(1, block_size(keys.device, CACHE_BLOCK) // (group * entries))
    squares = torch.zeros(kv_heads, group, entries, device=keys.device)
    for head in range(kv_heads):
        transposed_keys = keys[head].float().T
        for block in grouped[head].split(rows, 1):
            logits = (block.float() * scaling).flatten(0, 1) @ transposed_keys
            attention = torch.softmax(logits, -1, out=logits)
            squares[head] += attention.square_().unflatten(0, (group, -1)).sum(1)
    return squares.flatten(0, 1) / n
