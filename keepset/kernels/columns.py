"""Column statistics of causal attention in O(N) memory: what each entry received, without an N x N matrix."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

_CHUNK = 64
"""Queries per step: large enough for matrix products, small enough to stay in a core's cache."""

_BLOCK = 2**20
"""Logits of one KV head at a time on a CPU; with more, a pass over them waits for memory."""


def causal_attention(
    queries: Float[Tensor, "query_heads n head_dim"],
    keys: Float[Tensor, "kv_heads n head_dim"],
    values: Float[Tensor, "kv_heads n value_dim"],
    scaling: float,
) -> tuple[Float[Tensor, "query_heads n value_dim"], Float[Tensor, "query_heads n"]]:
    """Causal self-attention and the log-sum-exp of every query's logits, float32.

    On a CPU PyTorch's flash operator returns both at once; elsewhere the log-sum-exp is a pass of its own.
    """
    group = queries.shape[0] // keys.shape[0]
    query, key, value = (x[None] for x in (queries, *(x.repeat_interleave(group, 0) for x in (keys, values))))
    if queries.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True, scale=scaling
        )
        return output[0], lse[0].float()
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output[0], log_sum_exp(queries, keys, scaling)


def log_sum_exp(
    queries: Float[Tensor, "query_heads n head_dim"],
    keys: Float[Tensor, "kv_heads entries head_dim"],
    scaling: float,
) -> Float[Tensor, "query_heads n"]:
    """Log-sum-exp of every query's causal logits; the queries are those of the last `n` entries."""
    parts = [
        _logits(queries, keys, scaling, start, _CHUNK).logsumexp(-1) for start in range(0, queries.shape[1], _CHUNK)
    ]
    return torch.cat(parts, 2).flatten(0, 1)


def column_statistics(
    queries: Float[Tensor, "query_heads n head_dim"],
    keys: Float[Tensor, "kv_heads entries head_dim"],
    lse: Float[Tensor, "query_heads n"],
    scaling: float,
    names: Collection[str],
) -> dict[str, Float[Tensor, "query_heads entries"]]:
    """Sum and maximum, over the queries, of the causal attention that each entry receives.

    The queries are those of the last `n` entries. The maximum needs no exponential per pair: exp is
    monotone, so it is taken of the largest logit less its log-sum-exp.
    """
    kv_heads, entries, _ = keys.shape
    grouped = queries.unflatten(0, (kv_heads, -1))
    lse = lse.view(grouped.shape[:3])
    group, on_cpu = grouped.shape[1], keys.device.type == "cpu"
    heads, rows = (1, min(max(_BLOCK // max(group * entries, 1), 1), _CHUNK)) if on_cpu else (kv_heads, _CHUNK)
    total = torch.zeros(kv_heads, group, entries, device=keys.device)
    largest = torch.full_like(total, float("-inf"))
    for head in range(0, kv_heads, heads):
        part = slice(head, head + heads)
        own = grouped[part].flatten(0, 1)
        for start in range(0, queries.shape[1], rows):
            logits = _logits(own, keys[part], scaling, start, rows, lse[part])
            seen = logits.shape[-1]
            if "max" in names:
                seen_max = largest[part, :, :seen]
                torch.maximum(seen_max, logits.amax(2), out=seen_max)
            if "sum" in names:
                total[part, :, :seen] += logits.exp_().sum(2)
    statistics = {"sum": total, "max": largest.exp()}
    return {name: statistics[name].flatten(0, 1) for name in names}


class Columns:
    """Column statistics of a text that comes in chunks.

    Attributes:
        statistics: by their names, of the entries so far.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.statistics: dict[str, Float[Tensor, "query_heads entries"]] = {}

    def add(
        self,
        queries: Float[Tensor, "query_heads n head_dim"],
        keys: Float[Tensor, "kv_heads entries head_dim"],
        scaling: float,
        lse: Float[Tensor, "query_heads n"] | None = None,
    ) -> None:
        """Takes in the queries of the last `n` entries, and their log-sum-exp where attention computed it already."""
        if not queries.shape[1]:  # nothing but padding
            lse = queries.new_zeros(queries.shape[:2], dtype=torch.float32)
        lse = log_sum_exp(queries, keys, scaling) if lse is None else lse
        new = column_statistics(queries, keys, lse, scaling, self._names)
        for name, before in self.statistics.items():
            new[name] = MERGE[name](new[name], F.pad(before, (0, keys.shape[1] - before.shape[1])))
        self.statistics = new


MERGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "square": torch.add}
"""From a statistic of some queries and that of others to that of all; for none of them it is zero."""


def _logits(queries: Tensor, keys: Tensor, scaling: float, start: int, most: int, lse: Tensor | None = None) -> Tensor:
    """Causal logits of one chunk of queries, less their log-sum-exp, `[kv_heads, group, chunk, seen]`, float32."""
    kv_heads, entries, head_dim = keys.shape
    chunk = queries[:, start : start + most]
    rows = chunk.shape[1]
    first = entries - queries.shape[1] + start
    folded = chunk.reshape(kv_heads, -1, head_dim)
    past = keys[:, : first + rows].transpose(1, 2)
    shift = None if lse is None else lse[:, :, start : start + rows].reshape(kv_heads, -1, 1)
    if shift is not None and keys.dtype == shift.dtype:
        # Subtracting inside the product saves a pass over what does not fit a cache.
        logits = torch.baddbmm(shift, folded, past, beta=-1, alpha=scaling)
    else:
        logits = torch.bmm(folded, past).float() * scaling
        logits = logits if shift is None else logits - shift
    logits = logits.view(kv_heads, -1, rows, first + rows)
    # Only the diagonal block holds anything of the future.
    future = torch.ones(rows, rows, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., first:].masked_fill_(future, float("-inf"))
    return logits
