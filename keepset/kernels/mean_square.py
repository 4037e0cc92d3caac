"""What a cache's entries would receive of queries that come after all of them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_BLOCK = 2**18
"""Numbers of attention at a time: half of what a core's cache holds, or less."""

_DEVICE_BLOCK = 2**26
"""The same where operations are launched: few of them, in a quarter of a gigabyte."""


def mean_square(
    queries: Float[Tensor, "query_heads n head_dim"],
    keys: Float[Tensor, "kv_heads entries head_dim"],
    scaling: float,
) -> Float[Tensor, "query_heads entries"]:
    """Mean square of the attention of `n` queries that see all entries, in float32; of none it is zero.

    The attention is made in blocks of queries: it is never there as a whole.
    """
    kv_heads, entries, _ = keys.shape
    grouped = queries.unflatten(0, (kv_heads, -1))
    group, n = grouped.shape[1:3]
    most = _BLOCK if keys.device.type == "cpu" else _DEVICE_BLOCK
    rows = max(1, most // (group * entries))
    received = torch.zeros(kv_heads, group, entries, device=keys.device)
    for head in range(kv_heads):
        facing = keys[head].float().T
        for few in grouped[head].split(rows, 1):
            logits = (few.float() * scaling).flatten(0, 1) @ facing
            attention = torch.softmax(logits, -1, out=logits)
            received[head] += attention.square_().unflatten(0, (group, -1)).sum(1)
    return received.flatten(0, 1) / max(n, 1)
