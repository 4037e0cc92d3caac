"""Building blocks of kernels that read entries block by block: sizes, a streamed softmax, logits of a few queries."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_MOST = 64
"""Rows that make a product efficient."""
_LEAST = 16
"""The least rows of a product."""
_BYTES = 16 * 1024
"""Bytes of one block. A program loads up to six blocks at a time and has 99 KiB."""

LEAST_PART = 256
"""The least entries of a part of a head; a shorter part is not worth its own program."""
PROGRAMS_PER_PROCESSOR = 4
"""Programs that keep a processor busy."""


def rows_of(width: int, dtype: torch.dtype) -> int:
    """Return how many rows of `width` numbers a block has, a power of two.

    Args:
        width: numbers of a row.
        dtype: theirs.
    """
    return max(_LEAST, min(_MOST, _BYTES // (width * dtype.itemsize)))


def query_sizes(group: int, n: int, head_dim: int, dtype: torch.dtype, largest: bool) -> dict[str, Any]:
    """Return the sizes of kernels that process `n` queries of each head of a group in blocks.

    A block is `TOKENS` queries of `WIDE` heads. It has `ROWS` log-sum-exps: one for each query and head, or for each
    query if only the largest logit of the heads counts.

    Args:
        group: query heads of a KV head.
        n: queries of each head.
        head_dim: numbers of a query.
        dtype: theirs.
        largest: whether only the largest logit of the heads counts.
    """
    wide, head_block = triton.next_power_of_2(group), max(16, triton.next_power_of_2(head_dim))
    block = rows_of(head_block, dtype)
    tokens = max(16 // wide, min(max(block // wide, 1), triton.next_power_of_2(n)), 1)
    return dict(
        GROUP=group, WIDE=wide, TOKENS=tokens, HEAD_DIM=head_dim, HEAD_BLOCK=head_block, BLOCK=block, LARGEST=largest,
        ROWS=tokens * (1 if largest else wide),
    )  # fmt: skip


@triton.jit
def begun(sinks, index, exists, split, ROWS: tl.constexpr, SINKS: tl.constexpr):
    """Return `largest` and `total` of `streamed` before any entry; sinks count once, in the first part.

    Args:
        sinks: pointer to the sinks.
        index: of each row's sink.
        exists: which rows exist.
        split: the part of the head.
        ROWS: how many rows there are.
        SINKS: whether there are sinks.
    """
    largest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    if SINKS:
        sink = tl.load(sinks + index, mask=exists, other=float("-inf")).to(tl.float32)
        largest = tl.where(split == 0, sink, largest)
        total = tl.where(largest == float("-inf"), 0.0, 1.0)
    return largest, total


@triton.jit
def streamed(largest, total, logits):
    """Add one block to the rows' softmax.

    Args:
        largest: largest logit of each row so far.
        total: sum of `exp(logit - largest)` so far.
        logits: logits of the block, `[rows, entries]`.

    Returns:
        The new `largest` and `total`, the block's exponentials, and the factor by which to multiply earlier sums.
    """
    new_largest = tl.maximum(largest, tl.max(logits, 1))
    # The difference would be NaN for rows that have seen nothing yet.
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights, shrink = tl.exp(logits - shift[:, None]), tl.exp(largest - shift)
    return new_largest, total * shrink + tl.sum(weights, 1), weights, shrink


@triton.jit
def capped(logits, cap):
    """Return `cap * tanh(logits / cap)`; NaN stays NaN.

    Args:
        logits: any.
        cap: their bound.
    """
    return 2.0 * cap * tl.sigmoid(logits * (2.0 / cap)) - cap


@triton.jit
def seen_logits(
    q, k, bias, visible, scaling, cap,
    TOKENS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Return the logits of queries, `WIDE` heads for each token, and a block of entries.

    Logits of invisible entries are minus infinity. With `LARGEST` there is one row for each token: the largest of its
    heads' logits, or NaN if one of them is NaN.

    Args:
        q, k: queries `[rows, dims]` and keys `[dims, entries]`.
        bias: of each entry, if `BIASED`.
        visible: `[rows, entries]`.
        scaling: factor of the products.
        cap: bound of the logits, if `CAPPED`.
        TOKENS, WIDE, BLOCK: tokens, heads of each, and entries.
        LARGEST, BIASED, CAPPED: what is to be done.
    """
    logits = tl.dot(q, k, input_precision="ieee") * scaling
    if CAPPED:
        logits = capped(logits, cap)
    if BIASED:
        logits += bias[None, :]
    logits = tl.where(visible, logits, float("-inf"))
    if LARGEST:
        members = tl.reshape(logits, [TOKENS, WIDE, BLOCK])
        spoilt = tl.min((members <= float("inf")).to(tl.int32), 1) == 0
        logits = tl.where(spoilt, float("nan"), tl.max(members, 1))
    return logits


@triton.jit
def log_sum_exp(largest, total):
    """Return the log-sum-exp of streamed rows; minus infinity for rows that saw nothing; NaN stays NaN.

    Args:
        largest, total: as in `streamed`.
    """
    return tl.where(largest == float("-inf"), largest + total, largest + tl.log(total))


@triton.jit
def received(logits, partial, row, part, parts, PARTS: tl.constexpr, NUMBERS: tl.constexpr):
    """Return the attention that a block of entries receives from rows, given their log-sum-exps over parts of entries.

    Rows are summed into `NUMBERS` numbers of each entry: `[NUMBERS, BLOCK]`.

    Args:
        logits: `[rows, entries]`.
        partial: pointer to the log-sum-exps of all rows and parts.
        row, part: which of them.
        parts: how many parts there are.
        PARTS: places for parts of each row.
        NUMBERS: numbers of each entry.
    """
    lse = tl.load(partial + row[:, None] * PARTS + part[None, :], mask=(part < parts)[None, :], other=float("-inf"))
    most = tl.max(lse, 1)
    shift = tl.where(most == float("-inf"), 0.0, most)
    attention = tl.exp(logits - shift[:, None]) / tl.sum(tl.exp(lse - shift[:, None]), 1)[:, None]
    # A query that sees nothing would give 0 / 0. A query with NaN gives NaN to all entries that it sees.
    attention = tl.where(logits == float("-inf"), 0.0, attention)
    return tl.sum(tl.reshape(attention, [logits.shape[0] // NUMBERS, NUMBERS, logits.shape[1]]), 0)


@triton.jit
def add_numbers(
    column, entry_rows, written, stored, sums, GROUP: tl.constexpr, MEAN: tl.constexpr, NUMBERS: tl.constexpr
):
    """Add sums to the numbers of entries in a column.

    Args:
        column: pointer to it.
        entry_rows: where the entries are.
        written: which of them have a number; the others count as zero.
        stored: which of them exist.
        sums: `[NUMBERS, entries]`.
        GROUP: query heads of a KV head.
        MEAN: whether to divide by `GROUP`.
        NUMBERS: numbers of each entry, or a power of two above.
    """
    number, of_entry = tl.arange(0, NUMBERS), GROUP if NUMBERS > 1 else 1
    target = column + entry_rows[None, :].to(tl.int64) * of_entry + number[:, None]
    real = (number < of_entry)[:, None]
    before = tl.load(target, mask=real & written[None, :], other=0.0)
    tl.store(target, before + sums / (GROUP if MEAN else 1), mask=real & stored[None, :])
