"""Attention over entries that are stored packed, heads of different lengths side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


class Span(NamedTuple):
    """Neighbouring heads of a store that hold equally many entries: views, nothing is copied."""

    first: int
    keys: Float[Tensor, "heads entries head_dim"]
    values: Float[Tensor, "heads entries value_dim"]
    positions: Int[Tensor, "heads entries"]


def attend(
    queries: Float[Tensor, "batch query_heads n head_dim"],
    spans: Iterable[Span],
    kv_heads: int,
    scaling: float,
    query_positions: Int[Tensor, "batch n"] | None = None,
) -> Float[Tensor, "batch n query_heads value_dim"]:
    """Attention of the newest tokens over their own head's entries.

    The query group of a KV head is folded into the query axis: nothing is repeated and nothing padded.
    A span per head costs less on a CPU than padding to the longest does. Without `query_positions` every
    query sees every entry; with them, the entries up to its own position.
    """
    batch, query_heads, n, head_dim = queries.shape
    group = query_heads // kv_heads
    folded = queries.reshape(batch * kv_heads, group * n, head_dim)
    outputs = []
    for span in spans:
        rows = span.keys.shape[0]
        visible = None
        if query_positions is not None:
            at = query_positions.repeat_interleave(kv_heads, 0)[span.first : span.first + rows]
            visible = span.positions[:, None, None, :] <= at[:, None, :, None]
            visible = visible.expand(-1, group, -1, -1).flatten(1, 2)[None]
        outputs.append(
            F.scaled_dot_product_attention(
                folded[None, span.first : span.first + rows],
                span.keys[None],
                span.values[None],
                attn_mask=visible,
                scale=scaling,
            )[0]
        )
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.view(batch, query_heads, n, -1).transpose(1, 2).contiguous()
