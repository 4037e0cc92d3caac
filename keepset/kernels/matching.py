"""Attention matching: biases and values of kept entries, so that attention over them gives what it gave over all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.kernels.blocks import PRODUCT_BLOCK, block_size

_STEPS = 10
"""Of the multiplicative updates; twice as many brought nothing nearer to the full cache."""
_LEAST, _MOST = 1e-3, 1e3
"""How many entries one may stand for."""
_ROUNDING = 1e-9
"""Of an output's square: where all entries have lost as much, biases change what comes later alone."""


class FitProblem(NamedTuple):
    """KV heads of as many entries and reference queries each: what attention over all of them gives.

    Attributes:
        queries: the reference queries of each head's group, after rotation.
        asked: which of them exist.
        keys, values: of all entries.
        added: what is added to the logits of each entry; minus infinity hides it.
    """

    queries: Float[Tensor, "heads m head_dim"]
    asked: Bool[Tensor, "heads m"]
    keys: Float[Tensor, "heads entries head_dim"]
    values: Float[Tensor, "heads entries value_dim"]
    added: Float[Tensor, "heads entries"]

    def of(self, rows: Int[Tensor, " rows"]) -> FitProblem:
        """Some of them."""
        return FitProblem(*(part[rows] for part in self))


def match_attention(
    heads: FitProblem,
    kept: Int[Tensor, "heads k"],
    exists: Bool[Tensor, "heads k"],
    scaling: float,
    ridge: float,
    biases: bool,
) -> tuple[Float[Tensor, "heads k"], Float[Tensor, "heads k value_dim"]]:
    """Fits kept entries to the reference queries (Zweiger et al. 2026, arXiv:2602.16284).

    Of every query the kept entries have a share of the attention over all. Biases are logarithms of the weights for
    which the shares sum to what all entries have, by multiplicative updates of non-negative least squares (Lee and
    Seung 2001), as ridge regression towards one weight for all. Values are then those with which attention over the
    kept entries alone is nearest to the output of all: ridge regression towards the values that were there. Where the
    outcome is further from that output than the entries as they were, these stay.

    Args:
        heads: what attention over all entries looks at.
        kept: places of the entries that stay; any where `exists` is false.
        exists: which of them there are.
        scaling: of the logits.
        ridge: of weights and of values, in parts of the mean diagonal of their normal equations.
        biases: whether entries get biases; otherwise these are zero.

    Returns:
        What is added to each kept entry's bias, and its new value, float32.
    """
    outputs, shares = _reference(heads, kept, exists, scaling)
    before = _gathered(heads.values, kept).float().masked_fill(~exists[..., None], 0.0)
    as_it_was = _normalised(shares)
    count = exists.sum(-1)
    weights = _weights(shares, ridge, count) if biases else torch.ones_like(shares[:, 0])
    paid = _normalised(shares * weights[:, None])
    residual = outputs - paid @ before
    values = before + _ridge(paid, residual, ridge, count)
    # In all of a head's queries together: the ridge can only gain, but the biases before it may lose.
    fitted, before_error = _square(outputs - paid @ values), _square(outputs - as_it_was @ before)
    good = fitted.isfinite() & (fitted <= before_error + _ROUNDING * _square(outputs))
    whole = count == heads.added.isneginf().logical_not().sum(-1)
    changed = (good & ~whole)[:, None]
    return weights.log().where(changed & exists, 0.0), values.where(changed[..., None], before)


def _reference(
    heads: FitProblem, kept: Int[Tensor, "heads k"], exists: Bool[Tensor, "heads k"], scaling: float
) -> tuple[Float[Tensor, "heads m value_dim"], Float[Tensor, "heads m k"]]:
    """Attention's output over all entries, and the share of it that the kept ones have, in blocks of queries."""
    # Places that hold nothing may hold NaN.
    hidden = heads.added.isneginf()[..., None]
    keys = heads.keys.float().masked_fill(hidden, 0.0).transpose(1, 2)
    values = heads.values.float().masked_fill(hidden, 0.0)
    outputs, shares = [], []
    for block, asked in _blocks(heads):
        logits = torch.baddbmm(heads.added[:, None], block.float(), keys, alpha=scaling)
        attention = torch.softmax(logits, -1, out=logits).nan_to_num_(0.0).masked_fill_(~asked[..., None], 0.0)
        outputs.append(attention @ values)
        places = kept[:, None].expand(-1, attention.shape[1], -1)
        shares.append(attention.gather(-1, places).masked_fill_(~exists[:, None], 0.0))
    return torch.cat(outputs, 1), torch.cat(shares, 1)


def _blocks(heads: FitProblem) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(1, block_size(heads.keys.device, PRODUCT_BLOCK) // heads.keys[..., 0].numel())
    return zip(heads.queries.split(rows, 1), heads.asked.split(rows, 1), strict=True)


def _weights(shares: Float[Tensor, "heads m k"], ridge: float, count: Tensor) -> Float[Tensor, "heads k"]:
    """How many entries each kept one stands for: `shares @ weights` is next to 1 for every query that exists.

    It costs to leave the one weight that would be best if all were alike. Without that the entries that hardly any
    reference query looks at stand for whatever the rest has lost, which no other query agrees with.
    """
    target, penalty = shares.sum(1), _penalty(shares, ridge, count)
    alike = target.sum(-1, keepdim=True) / _square(shares.sum(-1)).clamp(min=torch.finfo(shares.dtype).tiny)[:, None]
    alike = alike.where(target.any(-1, keepdim=True), 1.0)
    weights = alike.expand_as(target)
    for _ in range(_STEPS):
        met = (shares @ weights[..., None]).transpose(1, 2) @ shares
        weights = weights * (target + penalty * alike) / (met[:, 0] + penalty * weights)
    return weights.clamp(_LEAST, _MOST)


def _ridge(
    paid: Float[Tensor, "heads m k"], residual: Float[Tensor, "heads m value_dim"], ridge: float, count: Tensor
) -> Float[Tensor, "heads k value_dim"]:
    """What to add to the values, by the smaller of the two systems: one row an entry, or one a query."""
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
    """What is added to the diagonal of the rows' normal equations: so many parts of its mean."""
    return (ridge * _square(rows) / count.clamp(min=1) + torch.finfo(rows.dtype).tiny)[:, None]


def _normalised(shares: Float[Tensor, "heads m k"]) -> Float[Tensor, "heads m k"]:
    return shares / shares.sum(-1, keepdim=True).clamp(min=torch.finfo(shares.dtype).tiny)


def _square(numbers: Float[Tensor, "heads *rest"]) -> Float[Tensor, " heads"]:
    return numbers.square().flatten(1).sum(-1)


def _gathered(rows: Float[Tensor, "heads entries dim"], places: Int[Tensor, "heads k"]) -> Float[Tensor, "heads k dim"]:
    return rows.gather(1, places[..., None].expand(-1, -1, rows.shape[-1]))
