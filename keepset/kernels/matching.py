"""Attention matching: fit biases and values of kept entries so that attention over them is near that over all."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.kernels.dispatch import PRODUCT_BLOCK, block_size
from keepset.kernels.entry_format import EntryFormat
from keepset.kernels.softmax import Softmax, with_sink

_STEPS = 10
"""Number of multiplicative updates; twice as many came no nearer to the full cache."""
_LEAST, _MOST = 1e-3, 1e3
"""The least and the largest number of entries that one kept entry stands for."""
_ROUNDING = 1e-9
"""Part of an output's square that counts as rounding. Equal biases gain nothing now, but matter for later tokens."""


class FitProblem(NamedTuple):
    """Inputs of attention over all entries, for KV heads with equally many entries and reference queries.

    Attributes:
        queries: reference queries of each head's group, after rotation.
        asked: which of the queries exist.
        keys, values: keys and values of all entries.
        added: bias of each entry's logit; minus infinity hides the entry.
    """

    queries: Float[Tensor, "heads m head_dim"]
    asked: Bool[Tensor, "heads m"]
    keys: Float[Tensor, "heads entries head_dim"]
    values: Float[Tensor, "heads entries value_dim"]
    added: Float[Tensor, "heads entries"]

    def of(self, rows: Int[Tensor, " rows"]) -> FitProblem:
        """Return the problem of some of the heads."""
        return FitProblem(*(part[rows] for part in self))


def match_attention(
    heads: FitProblem,
    kept: Int[Tensor, "heads k"],
    exists: Bool[Tensor, "heads k"],
    softmax: Softmax,
    ridge: float,
    biases: bool,
    format: EntryFormat | None = None,
) -> tuple[Float[Tensor, "heads k"], Float[Tensor, "heads k value_dim"]]:
    """Fit kept entries to the reference queries (Zweiger et al. 2026, arXiv:2602.16284).

        shares  = softmax over all entries, of the kept ones              [m, k]
        weights = argmin_w |shares @ w - 1|^2 + ridge                     bias = log(weights)
        paid    = shares * weights, normalised                            [m, k]
        values  = argmin_v |paid @ v - output over all|^2 + ridge towards the old values

    The weights come from multiplicative updates for non-negative least squares (Lee and Seung 2001), with a ridge
    towards one weight for all. A head whose fit is further from the full output than its unchanged entries is left
    unchanged. If a sink in the softmax takes a part of a query's attention, the shares are fitted and normalised to the
    rest of it instead of 1.

    Args:
        heads: the inputs of attention over all entries.
        kept: indices of the entries that stay; any value where `exists` is False.
        exists: which of the kept entries exist.
        softmax: the model's softmax; its sinks are those of the heads' queries, `[heads, m]`.
        ridge: strength of both ridges, as a multiple of the mean diagonal of the normal equations.
        biases: whether to fit biases; otherwise they are zero.
        format: the storage format of kept keys, if `shares` must be computed from rounded keys; else None.

    Returns:
        The number to add to each kept entry's bias, and its new value; float32.
    """
    outputs, shares, sunk = _reference(heads, kept, exists, softmax, format)
    before = _gathered(heads.values, kept).float().masked_fill(~exists[..., None], 0.0)
    as_it_was = _normalised(shares, sunk)
    count = exists.sum(-1)
    weights = _weights(shares, sunk, ridge, count) if biases else torch.ones_like(shares[:, 0])
    paid = _normalised(shares * weights[:, None], sunk)
    residual = outputs - paid @ before
    values = before + _ridge(paid, residual, ridge, count)
    # Over all queries of a head: the ridge regression can only gain, but the biases before it may lose.
    fitted, before_error = _square(outputs - paid @ values), _square(outputs - as_it_was @ before)
    good = fitted.isfinite() & (fitted <= before_error + _ROUNDING * _square(outputs))
    whole = count == heads.added.isneginf().logical_not().sum(-1)
    changed = (good if format else good & ~whole)[:, None]
    return weights.log().where(changed & exists, 0.0), values.where(changed[..., None], before)


def _reference(
    heads: FitProblem,
    kept: Int[Tensor, "heads k"],
    exists: Bool[Tensor, "heads k"],
    softmax: Softmax,
    format: EntryFormat | None,
) -> tuple[Float[Tensor, "heads m value_dim"], Float[Tensor, "heads m k"], Float[Tensor, "heads m"] | None]:
    """Return attention's output over all entries, and the shares of kept entries and of a sink.

    It is computed in blocks of queries. With a `format`, the shares are those of the rounded kept keys.

    Args:
        heads: what is fitted.
        kept: indices of the kept entries.
        exists: which of them are no padding.
        softmax: of these heads.
        format: the format in which keys will be stored; None if they do not change.
    """
    # Places without an entry may hold NaN.
    hidden = heads.added.isneginf()[..., None]
    keys = heads.keys.float().masked_fill(hidden, 0.0).transpose(1, 2)
    values = heads.values.float().masked_fill(hidden, 0.0)
    stored = None
    if format is not None:
        kept_keys = _gathered(heads.keys, kept).masked_fill(~exists[..., None], 0.0)
        stored = kept_keys.float().transpose(1, 2), format.rounded(kept_keys).float().transpose(1, 2)
    outputs, shares, sunk = [], [], []
    size = max(1, block_size(heads.keys.device, PRODUCT_BLOCK) // heads.keys[..., 0].numel())
    for first in range(0, max(heads.queries.shape[1], 1), size):
        rows = slice(first, first + size)
        block, is_asked = heads.queries[:, rows], heads.asked[:, rows]
        if softmax.softcap is None:
            logits = torch.baddbmm(heads.added[:, None], block.float(), keys, alpha=softmax.scaling)
        else:
            logits = softmax.capped(block.float() @ keys * softmax.scaling) + heads.added[:, None]
        if softmax.sinks is None:
            attention = torch.softmax(logits, -1, out=logits)
        else:
            attention, lost = with_sink(logits, softmax.sinks[:, rows])
            sunk.append(lost.nan_to_num_(0.0).masked_fill_(~is_asked, 0.0))
        attention = attention.nan_to_num_(0.0).masked_fill_(~is_asked[..., None], 0.0)
        outputs.append(attention @ values)
        kept_indices = kept[:, None].expand(-1, attention.shape[1], -1)
        share = attention.gather(-1, kept_indices)
        if stored is not None:
            before, after = (softmax.capped(block.float() @ part * softmax.scaling) for part in stored)
            share *= (after - before).exp_().nan_to_num_(0.0)
        shares.append(share.masked_fill_(~exists[:, None], 0.0))
    return torch.cat(outputs, 1), torch.cat(shares, 1), torch.cat(sunk, 1) if sunk else None


def _weights(
    shares: Float[Tensor, "heads m k"], sunk: Float[Tensor, "heads m"] | None, ridge: float, count: Tensor
) -> Float[Tensor, "heads k"]:
    """Return how many entries each kept one stands for, so that `shares @ weights` is near 1 less the sink's share.

    The ridge pulls towards the single weight that is best for all entries. Without it an entry with little attention
    from the reference queries could get a large weight, which would be wrong for other queries.

    Args:
        shares: attention of each reference query to the kept entries.
        sunk: the sink's; None if there is none.
        ridge: how strongly weights are pulled together.
        count: how many entries each head keeps.
    """
    target = (shares if sunk is None else shares * (1.0 - sunk[..., None])).sum(1)
    penalty = _penalty(shares, ridge, count)
    uniform = target.sum(-1, keepdim=True) / _square(shares.sum(-1)).clamp(min=torch.finfo(shares.dtype).tiny)[:, None]
    uniform = uniform.where(target.any(-1, keepdim=True), 1.0)
    weights = uniform.expand_as(target)
    for _ in range(_STEPS):
        met = (shares @ weights[..., None]).transpose(1, 2) @ shares
        weights = weights * (target + penalty * uniform) / (met[:, 0] + penalty * weights)
    return weights.clamp(_LEAST, _MOST)


def _ridge(
    paid: Float[Tensor, "heads m k"], residual: Float[Tensor, "heads m value_dim"], ridge: float, count: Tensor
) -> Float[Tensor, "heads k value_dim"]:
    """Return the numbers to add to the values; the system is solved by entry or by query, whichever is smaller.

    Args:
        paid: attention of each reference query to the kept entries.
        residual: what is missing from the output.
        ridge: how strongly the numbers are pulled to zero.
        count: how many entries each head keeps.
    """
    transposed, penalty = paid.transpose(1, 2), _penalty(paid, ridge, count)
    by_query = paid.shape[1] < paid.shape[2]
    normal = paid @ transposed if by_query else transposed @ paid
    normal.diagonal(dim1=-2, dim2=-1).add_(penalty)
    factor, failed = torch.linalg.cholesky_ex(normal)
    if by_query:
        solved = transposed @ torch.cholesky_solve(residual, factor)
    else:
        solved = torch.cholesky_solve(transposed @ residual, factor)
    usable = (failed == 0) & solved.isfinite().flatten(1).all(-1)
    return solved.where(usable[:, None, None], 0.0)


def _penalty(rows: Float[Tensor, "heads m k"], ridge: float, count: Int[Tensor, " heads"]) -> Float[Tensor, "heads 1"]:
    """Return the number to add to the diagonal of the rows' normal equations: `ridge` times its mean.

    Args:
        rows: of the least squares.
        ridge: how strong the penalty is.
        count: how many entries each head keeps.
    """
    return (ridge * _square(rows) / count.clamp(min=1) + torch.finfo(rows.dtype).tiny)[:, None]


def _normalised(
    shares: Float[Tensor, "heads m k"], sunk: Float[Tensor, "heads m"] | None
) -> Float[Tensor, "heads m k"]:
    whole = shares.sum(-1, keepdim=True) if sunk is None else shares.sum(-1, keepdim=True) + sunk[..., None]
    return shares / whole.clamp(min=torch.finfo(shares.dtype).tiny)


def _square(numbers: Float[Tensor, "heads *rest"]) -> Float[Tensor, " heads"]:
    return numbers.square().flatten(1).sum(-1)


def _gathered(
    rows: Float[Tensor, "heads entries dim"], indices: Int[Tensor, "heads k"]
) -> Float[Tensor, "heads k dim"]:
    return rows.gather(1, indices[..., None].expand(-1, -1, rows.shape[-1]))
