"""Column statistics of attention, causal in O(N) memory: what each entry received, without an N x N matrix."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keepset.kernels.blocks import PRODUCT_BLOCK

_CHUNK = 64
"""Queries per step: large enough for matrix products, small enough to stay in a core's cache."""


class ColumnStatistic(StrEnum):
    """A statistic of the attention that entries receive; of no queries every one is zero."""

    SUM = "sum"
    MAX = "max"
    SQUARE = "square"
    """The sum of squares."""

    def over_queries(self, attention: Float[Tensor, "*heads queries entries"]) -> Float[Tensor, "*heads entries"]:
        """The statistic of these queries."""
        if self is ColumnStatistic.MAX:
            return attention.amax(-2)
        return (attention.square() if self is ColumnStatistic.SQUARE else attention).sum(-2)

    def merge(self, some: Float[Tensor, "*shape"], others: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The statistic of all queries from that of some and that of the others."""
        return torch.maximum(some, others) if self is ColumnStatistic.MAX else torch.add(some, others)


def causal_attention(
    queries: Float[Tensor, "query_heads n head_dim"],
    keys: Float[Tensor, "kv_heads n head_dim"],
    values: Float[Tensor, "kv_heads n value_dim"],
    scaling: float,
) -> tuple[Float[Tensor, "query_heads n value_dim"], Float[Tensor, "query_heads n"]]:
    """Causal self-attention of one request, and what it was normalised by.

    On a CPU PyTorch's flash operator returns both at once; elsewhere the log-sum-exp is a pass of its own. Memory grows
    with `n`, and keys and values are repeated for their query groups.

    Args:
        queries: after rotation.
        keys: after rotation.
        values: of the same tokens.
        scaling: of the logits.

    Returns:
        The output in the queries' precision, and the log-sum-exp of every query's logits, float32.
    """
    group = queries.shape[0] // keys.shape[0]
    query, key, value = (x[None] for x in (queries, *(x.repeat_interleave(group, 0) for x in (keys, values))))
    if queries.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = flash_attention(query, key, value, 0.0, True, scale=scaling)
        return output[0], lse[0].float()
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output[0], log_sum_exp(queries, keys, scaling)


def log_sum_exp(
    queries: Float[Tensor, "query_heads n head_dim"], keys: Float[Tensor, "kv_heads entries head_dim"], scaling: float
) -> Float[Tensor, "query_heads n"]:
    """Log-sum-exp of every query's causal logits, in memory that grows with the entries.

    Args:
        queries: of the last `n` entries.
        keys: of all entries.
        scaling: of the logits.

    Returns:
        float32, whatever the inputs are.
    """
    starts = range(0, queries.shape[1], _CHUNK)
    parts = [_causal_logits(queries, keys, scaling, start, _CHUNK).logsumexp(-1) for start in starts]
    return torch.cat(parts, 2).flatten(0, 1)


def column_statistics(
    queries: Float[Tensor, "query_heads n head_dim"],
    keys: Float[Tensor, "kv_heads entries head_dim"],
    lse: Float[Tensor, "query_heads n"],
    scaling: float,
    names: Collection[str],
) -> dict[str, Float[Tensor, "query_heads entries"]]:
    """Sum and maximum, over the queries, of the causal attention that each entry receives.

    The sum is the accumulated attention of H2O (Zhang et al. 2023, arXiv:2306.14048). The maximum needs no
    exponential per pair: exp is monotone, so it is taken of the largest logit less its log-sum-exp. Memory grows with
    the entries, time with `n` times the entries.

    Args:
        queries: of the last `n` entries, after rotation.
        keys: of all entries.
        lse: of the same queries, by `log_sum_exp` or `causal_attention`.
        scaling: of the logits.
        names: `sum`, `max` or both; only these are computed.

    Returns:
        The named statistics, float32.
    """
    kv_heads, entries, _ = keys.shape
    grouped = queries.unflatten(0, (kv_heads, -1))
    lse = lse.view(grouped.shape[:3])
    group, on_cpu = grouped.shape[1], keys.device.type == "cpu"
    # On a CPU one KV head at a time: with more logits a pass over them waits for memory.
    heads, rows = (1, min(max(PRODUCT_BLOCK // max(group * entries, 1), 1), _CHUNK)) if on_cpu else (kv_heads, _CHUNK)
    total = torch.zeros(kv_heads, group, entries, device=keys.device)
    largest = torch.full_like(total, float("-inf"))
    for head in range(0, kv_heads, heads):
        block = slice(head, head + heads)
        block_queries = grouped[block].flatten(0, 1)
        for start in range(0, queries.shape[1], rows):
            logits = _causal_logits(block_queries, keys[block], scaling, start, rows, lse[block])
            visible = logits.shape[-1]
            if "max" in names:
                running_max = largest[block, :, :visible]
                torch.maximum(running_max, logits.amax(2), out=running_max)
            if "sum" in names:
                total[block, :, :visible] += logits.exp_().sum(2)
    statistics = {"sum": total, "max": largest.exp()}
    return {name: statistics[name].flatten(0, 1) for name in names}


class ColumnAccumulator:
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
        """Takes in the next `n` queries.

        Args:
            queries: of the last `n` entries, after rotation; there may be none.
            keys: of all entries so far.
            scaling: of the logits.
            lse: the queries' log-sum-exp where attention computed it already.
        """
        if not queries.shape[1]:  # nothing but padding
            lse = queries.new_zeros(queries.shape[:2], dtype=torch.float32)
        lse = log_sum_exp(queries, keys, scaling) if lse is None else lse
        new = column_statistics(queries, keys, lse, scaling, self._names)
        for name, before in self.statistics.items():
            new[name] = ColumnStatistic(name).merge(new[name], F.pad(before, (0, keys.shape[1] - before.shape[1])))
        self.statistics = new


def _causal_logits(
    queries: Tensor, keys: Tensor, scaling: float, start: int, most: int, lse: Tensor | None = None
) -> Tensor:
    """Causal logits of one chunk of queries, less their log-sum-exp, `[kv_heads, group, chunk, visible]`, float32."""
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
