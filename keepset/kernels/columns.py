"""Statistics in O(N) memory: attention that each entry receives, and mean and covariance of rows that come in parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.kernels.dispatch import CACHE_BLOCK, PRODUCT_BLOCK, block_size, has_bfloat16, launched_on, uses_triton
from keepset.kernels.softmax import Softmax, normalised, softmax_attention

_CHUNK = 64
"""Queries per step: enough for efficient matrix products, few enough to stay in a core's cache."""
_PART = 1024
"""Rows in one product on a GPU."""
NAMES = ("count", "mean", "scatter")
"""Tensors of `Moments`."""


class ColumnStatistic(StrEnum):
    """A statistic over the attention that an entry receives from queries. It is zero if there are no queries."""

    SUM = "sum"
    MAX = "max"
    SQUARE = "square"
    """The sum of squares."""

    def over_queries(self, attention: Float[Tensor, "*heads queries entries"]) -> Float[Tensor, "*heads entries"]:
        """Return the statistic over the query axis of an attention matrix."""
        if self is ColumnStatistic.MAX:
            return attention.amax(-2)
        return (attention.square() if self is ColumnStatistic.SQUARE else attention).sum(-2)

    def merge(self, first: Float[Tensor, "*shape"], second: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the statistic over all queries, given those over two disjoint parts of them.

        Args:
            first, second: of the two parts.
        """
        return torch.maximum(first, second) if self is ColumnStatistic.MAX else torch.add(first, second)


def attention_columns(
    queries: Float[Tensor, "query_heads n head_dim"],
    keys: Float[Tensor, "kv_heads entries head_dim"],
    *,
    softmax: Softmax,
    names: Collection[str] = (ColumnStatistic.SUM,),
    causal: bool = True,
    lse: Float[Tensor, "query_heads n"] | None = None,
) -> dict[str, Float[Tensor, "query_heads entries"]]:
    """Return statistics of each entry's column of the attention matrix, without making the matrix.

        A = softmax(queries @ keys' * scaling)
        sum = A.sum(queries)     max = A.amax(queries)     square = (A * A).sum(queries)

    The sum is the accumulated attention of H2O (Zhang et al. 2023, arXiv:2306.14048); over a window of queries it is
    SnapKV's score. The maximum is that of KVzip and KVCompose. It takes one exponential per entry, since exp is
    monotone: max(A) = exp(max(logits - log-sum-exp)). Memory grows with the entries, time with `n` times the entries.
    On a GPU this is one Triton kernel, or two if the log-sum-exp is not given.

    Args:
        queries: queries after rotation, of the last `n` entries; if not `causal`, of tokens after all entries.
        keys: keys of all entries, after rotation.
        softmax: the model's softmax.
        names: statistics to compute: any of `sum`, `max` and `square` (sum of squares).
        causal: whether a query sees only the entries up to its own.
        lse: log-sum-exp of the queries' logits, if attention has computed it already.

    Returns:
        The statistics by name, float32.
    """
    kv_heads, entries, _ = keys.shape
    if not queries.shape[1]:  # only padding
        return {name: torch.zeros(queries.shape[0], entries, dtype=torch.float32, device=keys.device) for name in names}
    lse = log_sum_exp(queries, keys, softmax, causal) if lse is None else lse
    if uses_triton(keys.device):
        from keepset.kernels.triton import columns  # loads Triton

        with launched_on(keys.device):
            return columns.attention_columns(queries, keys, lse, softmax, names, causal)
    grouped = queries.unflatten(0, (kv_heads, -1))
    lse = lse.view(grouped.shape[:3])
    members, on_cpu = grouped.shape[1], keys.device.type == "cpu"
    # On a CPU one KV head at a time, because more logits would not fit the core's cache.
    heads, rows = (1, min(max(PRODUCT_BLOCK // max(members * entries, 1), 1), _CHUNK)) if on_cpu else (kv_heads, _CHUNK)
    total, square = (torch.zeros(kv_heads, members, entries, dtype=torch.float32, device=keys.device) for _ in range(2))
    largest = torch.full_like(total, float("-inf"))
    for head in range(0, kv_heads, heads):
        block = slice(head, head + heads)
        for start in range(0, queries.shape[1], rows):
            logits = _logits(grouped[block], keys[block], softmax, start, rows, causal, lse[block])
            visible = logits.shape[-1]
            if "max" in names:
                running_max = largest[block, :, :visible]
                torch.maximum(running_max, logits.amax(2), out=running_max)
            if "sum" in names or "square" in names:
                attention = logits.exp_()
                if "sum" in names:
                    total[block, :, :visible] += attention.sum(2)
                if "square" in names:
                    square[block, :, :visible] += attention.square_().sum(2)
    statistics = {"sum": total, "max": largest.exp(), "square": square}
    return {name: statistics[name].flatten(0, 1) for name in names}


def log_sum_exp(
    queries: Float[Tensor, "query_heads n head_dim"],
    keys: Float[Tensor, "kv_heads entries head_dim"],
    softmax: Softmax,
    causal: bool = True,
) -> Float[Tensor, "query_heads n"]:
    """Return the log-sum-exp of every query's logits in float32, in memory that grows with the entries.

    Args:
        queries: queries of the last `n` entries; if not `causal`, of tokens after all entries.
        causal: whether a query sees only the entries up to its own.
    """
    if uses_triton(keys.device):
        from keepset.kernels.triton import columns  # loads Triton

        with launched_on(keys.device):
            return softmax.with_sinks(columns.log_sum_exp(queries, keys, softmax, causal))
    grouped = queries.unflatten(0, (keys.shape[0], -1))
    starts = range(0, queries.shape[1], _CHUNK)
    parts = [_logits(grouped, keys, softmax, start, _CHUNK, causal).logsumexp(-1) for start in starts]
    return softmax.with_sinks(torch.cat(parts, 2).flatten(0, 1))


def _logits(
    queries: Float[Tensor, "kv_heads group n head_dim"],
    keys: Float[Tensor, "kv_heads entries head_dim"],
    softmax: Softmax,
    start: int,
    most: int,
    causal: bool,
    lse: Float[Tensor, "kv_heads group n"] | None = None,
) -> Float[Tensor, "kv_heads group chunk visible"]:
    """Return the float32 logits of one chunk of queries, less their log-sum-exp if it is given.

    Args:
        queries: of the last `n` entries; if not `causal`, of tokens after all entries.
        keys: of all entries.
        softmax: the model's softmax, whose sinks do not count.
        start: the first query of the chunk.
        most: the most queries of the chunk.
        causal: whether a query sees only the entries up to its own.
        lse: log-sum-exp of all queries' logits.
    """
    entries = keys.shape[1]
    chunk = queries[:, :, start : start + most]
    rows = chunk.shape[2]
    first = entries - queries.shape[2] + start
    visible = first + rows if causal else entries
    folded, past = chunk.flatten(1, 2), keys[:, :visible].transpose(1, 2)
    shift = None if lse is None else lse[:, :, start : start + rows].flatten(1)[..., None]
    if shift is not None and keys.dtype == shift.dtype and softmax.softcap is None:
        # Subtracting inside the product saves a pass over logits that do not fit a cache.
        logits = torch.baddbmm(shift, folded, past, beta=-1, alpha=softmax.scaling)
    else:
        logits = softmax.capped(torch.bmm(folded, past).float() * softmax.scaling)
        logits = logits if shift is None else logits - shift
    logits = logits.unflatten(1, (-1, rows))
    if causal:
        # Only the diagonal block holds future entries.
        future = torch.ones(rows, rows, dtype=torch.bool, device=keys.device).triu(1)
        logits[..., first:].masked_fill_(future, float("-inf"))
    return logits


def attention_with_lse(
    queries: Float[Tensor, "query_heads n head_dim"],
    keys: Float[Tensor, "kv_heads entries head_dim"],
    values: Float[Tensor, "kv_heads entries value_dim"],
    softmax: Softmax,
    causal: bool = True,
) -> tuple[Float[Tensor, "query_heads n value_dim"], Float[Tensor, "query_heads n"]]:
    """Return the attention of one request, and the log-sum-exp of each query's logits.

    PyTorch's fused operators return both if they accept the shapes; otherwise the log-sum-exp takes a second pass.
    Memory grows with queries and entries; keys and values are repeated for their query heads.

    Args:
        queries: queries after rotation. If `causal`, they belong to the same tokens as the entries.
        keys: keys after rotation.
        causal: whether a token sees only the entries up to its own. If False, each query sees all entries.

    Returns:
        The output in the queries' dtype, and the log-sum-exp of every query's logits in float32, the sink included.
    """
    if softmax.softcap is not None:
        output, lse = softmax_attention(queries[None], keys[None], values[None], softmax, causal=causal)
        return output[0].transpose(0, 1), lse[0]
    scaling, fused = softmax.scaling, _fused_operator(queries, keys, values)
    group, n, value_dim = queries.shape[0] // keys.shape[0], queries.shape[1], values.shape[-1]
    repeated = (x.repeat_interleave(group, 0) for x in (keys, values))
    query, key, value = (x.unsqueeze(0) for x in (queries, *repeated))
    if fused is None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling).squeeze(0)
        lse = log_sum_exp(queries, keys, Softmax(scaling), causal)
    else:
        if queries.device.type != "cpu":  # fused GPU operators require multiples of 8 numbers
            query, key, value = (F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in (query, key, value))
        operator, options = fused
        output, lse, *_ = operator(query, key, value, *options, causal, scale=scaling)
        # Some operators pad the log-sum-exp to a block of queries.
        output, lse = output.squeeze(0).narrow(-1, 0, value_dim), lse.squeeze(0).narrow(-1, 0, n).float()
    if softmax.sinks is None:
        return output, lse
    whole = softmax.with_sinks(lse)
    return output * (lse - whole).exp()[..., None].to(output.dtype), whole


def _fused_operator(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Callable[..., Any], Sequence[Any]] | None:
    device, dtype, square = queries.device, queries.dtype, keys.shape[-1] == values.shape[-1]
    aten, dropout = torch.ops.aten, 0.0
    if device.type == "cpu":
        return (aten._scaled_dot_product_flash_attention_for_cpu, [dropout]) if square else None
    if device.type != "cuda" or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    modern = has_bfloat16(device)
    if modern and square and dtype != torch.float32 and keys.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention, [dropout]
    if dtype == torch.bfloat16 and not modern:
        return None
    return aten._scaled_dot_product_efficient_attention, [None, True, dropout]  # no bias, and the log-sum-exp


def mean_square_attention(
    queries: Float[Tensor, "query_heads n head_dim"], keys: Float[Tensor, "kv_heads entries head_dim"], softmax: Softmax
) -> Float[Tensor, "query_heads entries"]:
    """Return the mean square of each entry's attention from `n` queries that see all entries, in float32.

        A = softmax(queries @ keys' * scaling)     result = (A * A).mean(queries)

    Attention is made in blocks of queries: memory grows with the entries, time with `n` times the entries.

    Args:
        queries: queries rotated to positions after all entries.
        keys: keys of all entries, after rotation.
    """
    if not keys.shape[1] or not queries.shape[1]:
        return torch.zeros(len(queries), keys.shape[1], dtype=torch.float32, device=keys.device)
    if uses_triton(keys.device):
        asking, square = queries.to(keys.dtype), ColumnStatistic.SQUARE
        columns = attention_columns(asking, keys, softmax=softmax, names=[square], causal=False)
        return columns[square] / queries.shape[1]
    kv_heads, entries, _ = keys.shape
    grouped = queries.unflatten(0, (kv_heads, -1))
    group, n = grouped.shape[1:3]
    rows = max(1, block_size(keys.device, CACHE_BLOCK) // (group * entries))
    squares = torch.zeros(kv_heads, group, entries, dtype=torch.float32, device=keys.device)
    sinks = softmax.by_query_group(1, kv_heads).sinks
    for head in range(kv_heads):
        transposed_keys = keys[head].float().T
        for block in grouped[head].split(rows, 1):
            logits = softmax.capped((block.float() * softmax.scaling).flatten(0, 1) @ transposed_keys)
            if sinks is None:
                attention = torch.softmax(logits, -1, out=logits).unflatten(0, (group, -1))
            else:
                attention = normalised(logits.unflatten(0, (group, -1)), sinks[head, :, None])
            squares[head] += attention.square_().sum(1)
    return squares.flatten(0, 1) / n


class Moments:
    """Mean and covariance of rows, merged over chunks (Chan, Golub and LeVeque 1983).

        mean = m1 + (m2 - m1) n2 / n     scatter = s1 + s2 + (m2 - m1)(m2 - m1)' n1 n2 / n     covariance = scatter / n

    A covariance matrix is symmetric, so only its upper triangle is stored.

    Attributes:
        mean: zero where no row was counted.
    """

    _full: bool

    def __init__(self) -> None:
        self._count: Tensor | None = None
        self.mean: Float[Tensor, "batch heads dim"]
        self._scatter: Float[Tensor, "batch heads _"]

    def add(self, rows: Float[Tensor, "batch heads n dim"], counted: Bool[Tensor, "batch n"], full: bool) -> None:
        """Add those rows of a chunk that count; memory does not grow.

        Args:
            rows: of every head.
            counted: which rows count.
            full: whether the whole covariance is computed, not only its diagonal; the same in every call.
        """
        weights = counted[:, None, :, None].to(rows.dtype)
        count = weights.sum(2)
        mean = (weights.transpose(-1, -2) @ rows)[:, :, 0] / count.clamp(min=1)
        centred = (rows - mean[:, :, None]).mul_(weights)
        scatter = _upper(_products(centred)) if full else centred.square().sum(2)
        if self._count is not None:
            total = count + self._count
            shift = mean - self.mean
            spread = _upper(shift[..., :, None] * shift[..., None, :]) if full else shift.square()
            scatter = self._scatter + scatter + spread * (count * self._count / total.clamp(min=1))
            mean = self.mean + shift * count / total.clamp(min=1)
            count = total
        self._count, self.mean, self._scatter, self._full = count, mean, scatter, full

    def merged_with(self, following: Sequence[Moments]) -> Moments:
        """Return the moments of this batch followed by those of other batches."""
        every = [moments.tensors for moments in (self, *following)]
        return Moments.of({name: torch.cat([part[name] for part in every]) for name in NAMES}, self._full)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], full: bool) -> Moments:
        """Return the moments whose `tensors` these are.

        Args:
            tensors: by the names in `NAMES`.
            full: whether they are of the whole covariance.
        """
        moments = cls()
        moments._count, moments.mean, moments._scatter = (tensors[name] for name in NAMES)
        moments._full = full
        return moments

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return dict(zip(NAMES, (self._counted, self.mean, self._scatter), strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def reordered(self, rows: Int[Tensor, " rows"]) -> Moments:
        """Return the moments of these requests of the batch."""
        return Moments.of({name: part[rows.to(part.device)] for name, part in self.tensors.items()}, self._full)

    @property
    def covariance(self) -> Float[Tensor, "batch heads *dims"]:
        """The population covariance (divided by the count): a matrix `[dim, dim]` for each head, or its diagonal."""
        covariance, size = self._scatter / self._counted.clamp(min=1), self.mean.shape[-1]
        if not self._full:
            return covariance
        rows, columns = torch.triu_indices(size, size, device=covariance.device)
        full = covariance.new_empty(*covariance.shape[:-1], size, size)
        full[..., rows, columns] = full[..., columns, rows] = covariance
        return full

    @property
    def _counted(self) -> Tensor:
        assert self._count is not None
        return self._count


def _products(rows: Float[Tensor, "batch heads n dim"]) -> Float[Tensor, "batch heads dim dim"]:
    """Return the sum over rows of each row's outer product with itself.

    A head's product has few numbers, so it would use few processors of a GPU. There, products of parts of the rows are
    computed and summed.
    """
    if rows.device.type == "cpu" or rows.shape[2] < 2 * _PART:
        return rows.transpose(-1, -2) @ rows
    whole = rows.shape[2] // _PART * _PART
    parts, remainder = rows[:, :, :whole].unflatten(2, (-1, _PART)), rows[:, :, whole:]
    return (parts.transpose(-1, -2) @ parts).sum(2) + remainder.transpose(-1, -2) @ remainder


def _upper(matrix: Float[Tensor, "*rows dim dim"]) -> Float[Tensor, "*rows _"]:
    """Return the upper triangle of each matrix as a row."""
    rows, columns = torch.triu_indices(matrix.shape[-1], matrix.shape[-1], device=matrix.device)
    return matrix[..., rows, columns]
