"""Attention mass: how much of what queries look at is kept."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.keep_set import LayerKeepSet


def attention_kept(
    attention: Float[Tensor, "batch query_heads window entries"],
    positions: Int[Tensor, "batch kv_heads entries"],
    kept: LayerKeepSet,
) -> Float[Tensor, "batch kv_heads"]:
    """Share of the window's attention that falls on kept entries, all queries of a KV head's group together.

    `attention` and `positions` are those of an Observation of the layer (`window_attention`, `positions`).
    1 where nobody attends to anything.
    """
    batch, kv_heads, _ = positions.shape
    stays = kept.mask(int(positions.max()) + 1).gather(-1, positions.long().clamp(min=0))
    mass = attention.float().reshape(batch, kv_heads, -1, attention.shape[-1]).sum(2)
    total = mass.sum(-1)
    return ((mass * stays).sum(-1) / total).masked_fill(total == 0, 1.0)
