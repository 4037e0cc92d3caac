"""Column statistics of attention: queries stream past blocks of keys, so that no N x N matrix is made."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from keepset.kernels.triton.softmax import capped, rows_of, streamed

_RULES = {"each": 0, "sum": 1, "mean": 2, "max": 3}


def attention_columns(queries, keys, lse, softmax, names, group, causal) -> dict[str, Float[Tensor, "heads entries"]]:
    """Compute `keepset.kernels.columns.attention_columns` in one launch.

    A program owns a block of entries and reads all queries past it. Every sum has one order and nothing is added
    atomically, so the numbers are the same every time.
    """
    query_heads, n, head_dim = queries.shape
    kv_heads, entries, _ = keys.shape
    members = query_heads // kv_heads
    heads = query_heads if group == "each" else kv_heads
    statistics = {name: torch.empty(heads, entries, device=keys.device) for name in names}
    unused, head_block = lse, max(16, triton.next_power_of_2(head_dim))
    block = rows_of(head_block, keys.dtype)
    _columns[(triton.cdiv(entries, block), heads)](
        queries, keys, lse, *(statistics.get(name, unused) for name in ("sum", "max", "square")),
        *queries.stride(), *keys.stride(), *lse.stride(), n, entries,
        softmax.scaling, softmax.softcap or 1.0,
        MEMBERS=members, RULE=_RULES[group], HEAD_DIM=head_dim, HEAD_BLOCK=head_block, BLOCK=block, CAUSAL=causal,
        SUM="sum" in names, MAX="max" in names, SQUARE="square" in names,
        CAPPED=softmax.softcap is not None,
    )  # fmt: skip
    return statistics


def log_sum_exp(queries, keys, softmax, causal) -> Float[Tensor, "query_heads n"]:
    """Compute `keepset.kernels.columns.log_sum_exp` without a sink in one launch."""
    query_heads, n, head_dim = queries.shape
    lse = torch.empty(query_heads, n, device=queries.device)
    head_block = max(16, triton.next_power_of_2(head_dim))
    block = rows_of(head_block, keys.dtype)
    _log_sum_exp[(triton.cdiv(n, block), query_heads)](
        queries, keys, lse, *queries.stride(), *keys.stride(), n, keys.shape[1],
        softmax.scaling, softmax.softcap or 1.0,
        MEMBERS=query_heads // keys.shape[0], HEAD_DIM=head_dim, HEAD_BLOCK=head_block, BLOCK=block, CAUSAL=causal,
        CAPPED=softmax.softcap is not None,
    )  # fmt: skip
    return lse


@triton.jit(do_not_specialize=["lse_head", "n", "entries"])
def _columns(
    queries, keys, lse, sums, maxima, squares,
    query_head, query_token, query_dim, key_head, key_entry, key_dim, lse_head, lse_token, n, entries, scaling, cap,
    MEMBERS: tl.constexpr, RULE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, SUM: tl.constexpr, MAX: tl.constexpr, SQUARE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of one block of entries of one head; program axes: (block of entries, head)."""
    first, head = tl.program_id(0) * BLOCK, tl.program_id(1)
    entry, dims = first + tl.arange(0, BLOCK), tl.arange(0, HEAD_BLOCK)
    stored, in_head = entry < entries, dims < HEAD_DIM
    # The columns of one query head, or those of a KV head's whole group.
    if RULE == 0:
        members: tl.constexpr = 1
        kv_head = head // MEMBERS
        first_query = head
    else:
        members: tl.constexpr = MEMBERS
        kv_head = head
        first_query = head * MEMBERS
    k = tl.load(
        keys + kv_head.to(tl.int64) * key_head + entry[None, :].to(tl.int64) * key_entry + dims[:, None] * key_dim,
        mask=stored[None, :] & in_head[:, None], other=0.0,
    )  # fmt: skip
    of_sums, of_maxima = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    of_squares = tl.zeros([BLOCK], tl.float32)
    # Query `i` belongs to entry `before + i`.
    before = entries - n
    start = 0
    if CAUSAL:
        start = tl.maximum(first - before, 0) // BLOCK * BLOCK
    for member in range(members):
        of_query = (first_query + member).to(tl.int64)
        total, largest = tl.zeros([BLOCK], tl.float32), tl.full([BLOCK], float("-inf"), tl.float32)
        square = tl.zeros([BLOCK], tl.float32)
        for offset in range(start, n, BLOCK):
            row = offset + tl.arange(0, BLOCK)
            q = tl.load(
                queries + of_query * query_head + row[:, None].to(tl.int64) * query_token + dims[None, :] * query_dim,
                mask=(row < n)[:, None] & in_head[None, :], other=0.0,
            )  # fmt: skip
            normaliser = tl.load(lse + of_query * lse_head + row.to(tl.int64) * lse_token, mask=row < n, other=0.0)
            logits = tl.dot(q, k, input_precision="ieee") * scaling
            if CAPPED:
                logits = capped(logits, cap)
            logits -= normaliser[:, None]
            visible = (row < n)[:, None]
            if CAUSAL:
                visible = visible & (entry[None, :] <= (before + row)[:, None])
            logits = tl.where(visible, logits, float("-inf"))
            if MAX:
                largest = tl.maximum(largest, tl.max(logits, 0))
            if SUM or SQUARE:
                attention = tl.exp(logits)
                if SUM:
                    total += tl.sum(attention, 0)
                if SQUARE:
                    square += tl.sum(attention * attention, 0)
        if RULE == 3:
            of_sums, of_squares = tl.maximum(of_sums, total), tl.maximum(of_squares, square)
            of_maxima = tl.maximum(of_maxima, tl.exp(largest))
        else:
            of_sums, of_squares, of_maxima = of_sums + total, of_squares + square, of_maxima + tl.exp(largest)
    if RULE == 2:
        of_sums, of_squares, of_maxima = of_sums / MEMBERS, of_squares / MEMBERS, of_maxima / MEMBERS
    place = head.to(tl.int64) * entries + entry
    if SUM:
        tl.store(sums + place, of_sums, mask=stored)
    if MAX:
        tl.store(maxima + place, of_maxima, mask=stored)
    if SQUARE:
        tl.store(squares + place, of_squares, mask=stored)


@triton.jit(do_not_specialize=["n", "entries"])
def _log_sum_exp(
    queries, keys, lse, query_head, query_token, query_dim, key_head, key_entry, key_dim, n, entries, scaling, cap,
    MEMBERS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exp of one block of queries of one head; program axes: (block of queries, query head)."""
    first, head = tl.program_id(0) * BLOCK, tl.program_id(1)
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
    for offset in range(0, last, BLOCK):
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
    tl.store(lse + head.to(tl.int64) * n + row, largest + tl.log(total), mask=exists)
