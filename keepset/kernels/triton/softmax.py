"""What kernels share that look at entries block by block: a softmax that is streamed, and logits of few queries."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def streamed(largest, total, logits):
    """One block more of the rows' softmax.

    Gives the largest logit and the sum of exponentials beside it, the block's exponentials, and what all that was
    added up before is to be multiplied with.
    """
    new_largest = tl.maximum(largest, tl.max(logits, 1))
    # Of rows that have seen nothing yet the difference would be NaN.
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights, shrink = tl.exp(logits - shift[:, None]), tl.exp(largest - shift)
    return new_largest, total * shrink + tl.sum(weights, 1), weights, shrink


@triton.jit
def seen_logits(
    q, k, bias, visible, scaling,
    TOKENS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Of queries, `WIDE` heads of each token, and a block of entries; minus infinity where an entry is not visible.

    With `LARGEST` one row for each token, of its heads' largest logits.
    """
    logits = tl.dot(q, k, input_precision="ieee") * scaling
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
    """Of rows that were streamed; of those that saw nothing minus infinity, and NaN stays NaN."""
    return tl.where(largest == float("-inf"), largest + total, largest + tl.log(total))


@triton.jit
def received(logits, partial, row, part, parts, PARTS: tl.constexpr):
    """What a block of entries receives of rows whose log-sum-exps, in parts of all entries, are known."""
    lse = tl.load(partial + row[:, None] * PARTS + part[None, :], mask=(part < parts)[None, :], other=float("-inf"))
    most = tl.max(lse, 1)
    shift = tl.where(most == float("-inf"), 0.0, most)
    attention = tl.exp(logits - shift[:, None]) / tl.sum(tl.exp(lse - shift[:, None]), 1)[:, None]
    # Of a query that sees nothing the quotient is 0 / 0; one that is spoilt spoils what it sees.
    return tl.sum(tl.where(logits == float("-inf"), 0.0, attention), 0)
