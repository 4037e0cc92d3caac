"""Column statistics of attention: queries stream past blocks of keys, so that no N x N matrix is made."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from keepset.kernels import dispatch
from keepset.kernels.triton.softmax import LEAST_PART, PROGRAMS_PER_PROCESSOR, capped, rows_of, streamed
from keepset.kernels.triton.softmax import log_sum_exp as log_sum_exp_of


def attention_columns(queries, keys, lse, softmax, names, causal) -> dict[str, Float[Tensor, "query_heads entries"]]:
    """Compute `keepset.kernels.columns.attention_columns` in one launch.

    A program owns a block of entries and streams all queries past it. Sums have a fixed order and no atomic additions,
    so results are reproducible.

    Args:
        queries, keys, softmax, names, causal: as there.
        lse: log-sum-exp of each query's logits.
    """
    query_heads, n, head_dim = queries.shape
    kv_heads, entries, _ = keys.shape
    statistics = {name: torch.empty(query_heads, entries, dtype=torch.float32, device=keys.device) for name in names}
    unused, head_block = lse, max(16, triton.next_power_of_2(head_dim))
    block = rows_of(head_block, keys.dtype)
    # With one statistic more rows fit the registers.
    rows = 2 * block if len(statistics) == 1 else block
    _columns[(triton.cdiv(entries, block), query_heads)](
        queries, keys, lse, *(statistics.get(name, unused) for name in ("sum", "max", "square")),
        *queries.stride(), *keys.stride(), *lse.stride(), n, entries,
        softmax.scaling, softmax.softcap or 1.0,
        MEMBERS=query_heads // kv_heads, HEAD_DIM=head_dim, HEAD_BLOCK=head_block, ROWS=rows, BLOCK=block,
        CAUSAL=causal, SUM="sum" in names, MAX="max" in names, SQUARE="square" in names,
        CAPPED=softmax.softcap is not None, num_stages=2,
    )  # fmt: skip
    return statistics


def log_sum_exp(queries, keys, softmax, causal) -> Float[Tensor, "query_heads n"]:
    """Compute `keepset.kernels.columns.log_sum_exp` without a sink in one launch, or in two if queries are few.

    Args:
        queries, keys, softmax, causal: as there.
    """
    query_heads, n, head_dim = queries.shape
    entries = keys.shape[1]
    head_block = max(16, triton.next_power_of_2(head_dim))
    block = rows_of(head_block, keys.dtype)
    blocks = triton.cdiv(n, block)
    # Few queries would not keep the device busy, so their entries are cut into parts.
    even = dispatch.processors(queries.device) * PROGRAMS_PER_PROCESSOR // max(blocks * query_heads, 1)
    part = max(LEAST_PART, triton.cdiv(triton.cdiv(entries, max(even, 1)), block) * block)
    parts = max(1, triton.cdiv(entries, part))
    lse = torch.empty(parts, query_heads, n, dtype=torch.float32, device=queries.device)
    _log_sum_exp[(blocks, query_heads, parts)](
        queries, keys, lse, *queries.stride(), *keys.stride(), n, entries, part,
        softmax.scaling, softmax.softcap or 1.0,
        MEMBERS=query_heads // keys.shape[0], HEAD_DIM=head_dim, HEAD_BLOCK=head_block, BLOCK=block, CAUSAL=causal,
        CAPPED=softmax.softcap is not None,
    )  # fmt: skip
    return lse[0] if parts == 1 else lse.logsumexp(0)


@triton.jit(do_not_specialize=["lse_head", "n", "entries"])
def _columns(
    queries, keys, lse, sums, maxima, squares,
    query_head, query_token, query_dim, key_head, key_entry, key_dim, lse_head, lse_token, n, entries, scaling, cap,
    MEMBERS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, SUM: tl.constexpr, MAX: tl.constexpr, SQUARE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Compute one query head's statistics of one block of entries; program axes: (block of entries, query head)."""
    first, head = tl.program_id(0) * BLOCK, tl.program_id(1)
    entry, dims = first + tl.arange(0, BLOCK), tl.arange(0, HEAD_BLOCK)
    stored, in_head = entry < entries, dims < HEAD_DIM
    kv_head, of_query = (head // MEMBERS).to(tl.int64), head.to(tl.int64)
    k = tl.load(
        keys + kv_head * key_head + entry[None, :].to(tl.int64) * key_entry + dims[:, None] * key_dim,
        mask=stored[None, :] & in_head[:, None], other=0.0,
    )  # fmt: skip
    # Query `i` belongs to entry `before + i`. From `whole` on, queries see all of the block.
    before = entries - n
    start, whole = 0, 0
    if CAUSAL:
        start = tl.maximum(first - before, 0) // ROWS * ROWS
        whole = tl.minimum(tl.cdiv(tl.maximum(first + BLOCK - 1 - before, 0), ROWS) * ROWS, n)
    # Rows are summed at the end, because threads of a sum over rows wait for one another.
    total, square = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    largest = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    for offset in range(start, whole, ROWS):
        row = offset + tl.arange(0, ROWS)
        logits = _less_lse(
            queries + of_query * query_head, k, lse + of_query * lse_head, row, dims, query_token, query_dim,
            lse_token, n, scaling, cap, HEAD_DIM, CAPPED,
        )  # fmt: skip
        logits = tl.where(entry[None, :] <= (before + row)[:, None], logits, float("-inf"))
        total, largest, square = _with(total, largest, square, logits, SUM, MAX, SQUARE)
    for offset in range(whole, n, ROWS):
        row = offset + tl.arange(0, ROWS)
        logits = _less_lse(
            queries + of_query * query_head, k, lse + of_query * lse_head, row, dims, query_token, query_dim,
            lse_token, n, scaling, cap, HEAD_DIM, CAPPED,
        )  # fmt: skip
        total, largest, square = _with(total, largest, square, logits, SUM, MAX, SQUARE)
    target = of_query * entries + entry
    if SUM:
        tl.store(sums + target, tl.sum(total, 0), mask=stored)
    if MAX:
        most = tl.exp(tl.max(largest, 0))
        tl.store(maxima + target, tl.where(most == float("inf"), float("nan"), most), mask=stored)
    if SQUARE:
        tl.store(squares + target, tl.sum(square, 0), mask=stored)


@triton.jit
def _less_lse(
    queries, k, lse, row, dims, query_token, query_dim, lse_token, n, scaling, cap,
    HEAD_DIM: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Return the logits of some queries less their log-sum-exp; minus infinity for queries that do not exist."""
    q = tl.load(
        queries + row[:, None].to(tl.int64) * query_token + dims[None, :] * query_dim,
        mask=(row < n)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    normaliser = tl.load(lse + row.to(tl.int64) * lse_token, mask=row < n, other=float("inf"))
    logits = tl.dot(q, k, input_precision="ieee") * scaling
    if CAPPED:
        logits = capped(logits, cap)
    return logits - normaliser[:, None]


@triton.jit
def _with(total, largest, square, logits, SUM: tl.constexpr, MAX: tl.constexpr, SQUARE: tl.constexpr):
    """Return the statistics of each row, updated with the attention of one more row."""
    if MAX:  # a maximum ignores NaN, so until the end NaN is stored as infinity
        largest = tl.maximum(largest, tl.where(logits <= float("inf"), logits, float("inf")))
    if SUM or SQUARE:
        attention = tl.exp(logits)
        if SUM:
            total += attention
        if SQUARE:
            square += attention * attention
    return total, largest, square


@triton.jit(do_not_specialize=["n", "entries", "part"])
def _log_sum_exp(
    queries, keys, lse, query_head, query_token, query_dim, key_head, key_entry, key_dim, n, entries, part,
    scaling, cap,
    MEMBERS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exps of a block of queries over a part of the entries; program axes: (block, head, part)."""
    first, head, split = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2)
    row, dims = first + tl.arange(0, BLOCK), tl.arange(0, HEAD_BLOCK)
    exists, in_head = row < n, dims < HEAD_DIM
    kv_head = (head // MEMBERS).to(tl.int64)
    q = tl.load(
        queries + head.to(tl.int64) * query_head + row[:, None].to(tl.int64) * query_token + dims[None, :] * query_dim,
        mask=exists[:, None] & in_head[None, :], other=0.0,
    )  # fmt: skip
    largest, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    last = entries
    if CAUSAL:
        last = tl.minimum(entries, entries - n + first + BLOCK)
    for offset in range(split * part, tl.minimum(split * part + part, last), BLOCK):
        entry = offset + tl.arange(0, BLOCK)
        k = tl.load(
            keys + kv_head * key_head + entry[None, :].to(tl.int64) * key_entry + dims[:, None] * key_dim,
            mask=(entry < entries)[None, :] & in_head[:, None], other=0.0,
        )  # fmt: skip
        logits = tl.dot(q, k, input_precision="ieee") * scaling
        if CAPPED:
            logits = capped(logits, cap)
        visible = (entry < entries)[None, :]
        if CAUSAL:
            visible = visible & (entry[None, :] <= (entries - n + row)[:, None])
        logits = tl.where(visible, logits, float("-inf"))
        largest, total, _, _ = streamed(largest, total, logits)
    target = (split.to(tl.int64) * tl.num_programs(1) + head) * n + row
    tl.store(lse + target, log_sum_exp_of(largest, total), mask=exists)
