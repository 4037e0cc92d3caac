"""Attention over entries that are stored packed, heads of different lengths side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


class HeadRun(NamedTuple):
    """Neighbouring heads of a store that hold equally many entries: views, nothing is copied.

    Attributes:
        first: the number of the run's first head, counted over all requests: `request * kv_heads + head`.
        keys: `[heads, entries, head_dim]`.
        values: `[heads, entries, value_dim]`.
        positions: of every entry, counted from its request's first token.
    """

    first: int
    keys: Float[Tensor, "heads entries head_dim"]
    values: Float[Tensor, "heads entries value_dim"]
    positions: Int[Tensor, "heads entries"]


def ragged_attention(
    queries: Float[Tensor, "batch query_heads n head_dim"],
    runs: Iterable[HeadRun],
    kv_heads: int,
    scaling: float,
    query_positions: Int[Tensor, "batch n"] | None = None,
) -> Float[Tensor, "batch n query_heads value_dim"]:
    """Attention of the newest tokens over their own head's entries.

    The query group of a KV head is folded into the query axis: nothing is repeated and nothing padded, so memory
    beyond the output is what `scaled_dot_product_attention` takes for one run. A run per head costs less on a CPU than
    padding to the longest head does.

    Args:
        queries: of the newest tokens, after rotation.
        runs: all heads of all requests, in order.
        kv_heads: KV heads of one request.
        scaling: of the logits.
        query_positions: every query then sees the entries up to its own position; without them it sees all.

    Returns:
        The output in the queries' precision, contiguous.
    """
    batch, query_heads, n, head_dim = queries.shape
    group = query_heads // kv_heads
    folded = queries.reshape(batch * kv_heads, group * n, head_dim)
    outputs = []
    for run in runs:
        heads = slice(run.first, run.first + run.keys.shape[0])
        visible = None
        if query_positions is not None:
            last_visible = query_positions.repeat_interleave(kv_heads, 0)[heads]
            visible = run.positions[:, None, None, :] <= last_visible[:, None, :, None]
            visible = visible.expand(-1, group, -1, -1).flatten(1, 2)[None]
        keys, values = run.keys[None], run.values[None]
        outputs.append(F.scaled_dot_product_attention(folded[None, heads], keys, values, visible, scale=scaling)[0])
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.view(batch, query_heads, n, -1).transpose(1, 2).contiguous()
