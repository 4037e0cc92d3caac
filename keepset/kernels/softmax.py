"""`Softmax`: how a model turns products of queries and keys into attention; and attention with caps and sinks.

Most models scale the products and take a softmax, which PyTorch's fused operators compute. Some also cap the logits
(Gemma 2), or have a sink: a learned logit per head that takes a part of the attention (gpt-oss).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keepset.kernels.dispatch import PRODUCT_BLOCK, block_size


@dataclass(frozen=True, eq=False)
class Softmax:
    """A model's softmax of products of queries and keys.

        logits    = softcap * tanh(products * scaling / softcap)
        attention = exp(logits) / (sum over entries of exp(logits) + exp(sink))

    keepset's biases, such as those of `match`, are added to logits after the cap.

    Attributes:
        scaling: factor of the products.
        softcap: bound of the logits; None if they are not capped.
        sinks: a logit of each query head that takes a part of the attention; None if there are none.
    """

    scaling: float
    softcap: float | None = None
    sinks: Float[Tensor, "*heads"] | None = None

    @property
    def plain(self) -> bool:
        """Return whether there are neither caps nor sinks, so that fused operators can compute it."""
        return self.softcap is None and self.sinks is None

    @property
    def without_sinks(self) -> Softmax:
        """The same softmax without sinks."""
        return self if self.sinks is None else replace(self, sinks=None)

    def of_layer(self, layer: int) -> Softmax:
        """Return the softmax of one layer, if the sinks are `[layers, heads]`."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[layer])

    def by_query_group(self, batch: int, kv_heads: int) -> Softmax:
        """Return the softmax with sinks for every KV head of every request, `[batch * kv_heads, group]`, float32.

        Args:
            batch: number of requests, or 1 for sinks that are broadcast.
        """
        if self.sinks is None:
            return self
        return replace(self, sinks=self.sinks.detach().float().view(kv_heads, -1).repeat(batch, 1))

    def capped(self, logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return scaled products of queries and keys, capped if the model caps them."""
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def with_sinks(self, lse: Float[Tensor, "heads *n"]) -> Float[Tensor, "heads *n"]:
        """Return the log-sum-exp with the sink, given that of the entries, `[heads, ...]`."""
        if self.sinks is None:
            return lse
        return torch.logaddexp(lse, self.sinks.float().view(-1, *[1] * (lse.ndim - 1)))


class GroupReduction(StrEnum):
    """How the attention of the query heads that share a KV head is reduced to an entry's numbers."""

    MEAN = "mean"
    """The mean over the query heads."""
    EACH = "each"
    """No reduction: one number for each query head."""
    LARGEST = "largest"
    """The softmax of the largest logit over the query heads, as if they were one head."""

    def shape(self, group: int) -> tuple[int, ...]:
        """Return the shape of one entry's numbers if `group` query heads share a KV head."""
        return (group,) if self is GroupReduction.EACH else ()

    def of(self, sums: Float[Tensor, "*heads members entries"]) -> Float[Tensor, "*heads entries *group"]:
        """Return each entry's numbers."""
        return sums.transpose(-1, -2) if self is GroupReduction.EACH else sums.mean(-2)


def normalised(
    logits: Float[Tensor, "*rows entries"], sinks: Float[Tensor, "*#rows"] | None = None
) -> Float[Tensor, "*rows entries"]:
    """Return the softmax of logits that are already capped; entries at minus infinity are not seen.

    Args:
        logits: of all entries.
        sinks: logit of each row's sink; None if there are none.
    """
    return logits.softmax(-1) if sinks is None else with_sink(logits, sinks)[0]


def with_sink(
    logits: Float[Tensor, "*rows entries"], sinks: Float[Tensor, "*#rows"]
) -> tuple[Float[Tensor, "*rows entries"], Float[Tensor, "*rows"]]:
    """Return the attention to entries and to the sink of each row; see `normalised`.

    Args:
        logits: of all entries, capped already.
        sinks: logit of each row's sink.
    """
    whole = torch.logaddexp(logits.logsumexp(-1), sinks)
    return (logits - whole[..., None]).exp(), (sinks - whole).exp()


def softmax_attention(
    queries: Float[Tensor, "batch query_heads n head_dim"],
    keys: Float[Tensor, "batch kv_heads entries head_dim"],
    values: Float[Tensor, "batch kv_heads entries value_dim"],
    softmax: Softmax,
    mask: Bool[Tensor, "#batch #query_heads #n entries"]
    | Float[Tensor, "#batch #query_heads #n entries"]
    | None = None,
    causal: bool = False,
) -> tuple[Float[Tensor, "batch n query_heads value_dim"], Float[Tensor, "batch query_heads n"]]:
    """Return attention with caps and sinks, which no fused operator computes, and the log-sum-exp of the logits.

    It is computed in blocks of queries, so memory grows with the entries. Gradients flow through the output.

    Args:
        keys, values: keys and values of all entries.
        softmax: the model's softmax; its sinks are `[query_heads]`, or `[query_heads, n]`.
        mask: which entries each query sees, or numbers to add to their logits; None: all are seen.
        causal: whether the queries belong to the newest entries and see none after their own; instead of a mask.

    Returns:
        The output in the values' dtype, contiguous, and the log-sum-exp in float32, the sink included. A query that
        sees nothing has the output zero.
    """
    batch, query_heads, n, _ = queries.shape
    entries = keys.shape[2]
    rows = max(1, block_size(queries.device, PRODUCT_BLOCK) // max(batch * query_heads * entries, 1))
    parts = []
    for first in range(0, n, rows):
        part = slice(first, min(first + rows, n))
        visible = entries - n + part.stop if causal else entries
        part_mask = mask if mask is None or mask.shape[2] == 1 else mask[:, :, part]
        sinks = None if softmax.sinks is None else softmax.sinks.float().view(query_heads, -1).expand(-1, n)[:, part]
        block = queries[:, :, part], keys[:, :, :visible], values[:, :, :visible]
        parts.append(_attend(*block, replace(softmax, sinks=sinks), part_mask, causal and part.stop - first > 1))
    output = torch.cat([part for part, _ in parts], 2).transpose(1, 2).contiguous()
    return output, torch.cat([lse for _, lse in parts], 2)


def _attend(
    queries: Float[Tensor, "batch query_heads n head_dim"],
    keys: Float[Tensor, "batch kv_heads entries head_dim"],
    values: Float[Tensor, "batch kv_heads entries value_dim"],
    softmax: Softmax,
    mask: Tensor | None,
    causal: bool,
) -> tuple[Float[Tensor, "batch query_heads n value_dim"], Float[Tensor, "batch query_heads n"]]:
    """Return the attention of one block of queries and its log-sum-exp.

    Args:
        queries: one block of them.
        keys, values: of all entries that they may see.
        softmax: with sinks `[query_heads, n]`.
        mask: as in `softmax_attention`, for these queries.
        causal: whether the queries belong to the newest of these entries.
    """
    kv_heads, n = keys.shape[1], queries.shape[2]
    folded = queries.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    logits = softmax.capped((folded @ keys.transpose(-1, -2)).float() * softmax.scaling)
    logits = logits.unflatten(2, (-1, n)).flatten(1, 2)
    if causal:
        future = torch.ones(n, n, dtype=torch.bool, device=logits.device).triu(1)
        logits = torch.cat([logits[..., :-n], logits[..., -n:].masked_fill(future, float("-inf"))], -1)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    lse = logits.logsumexp(-1)
    if softmax.sinks is not None:
        lse = torch.logaddexp(lse, softmax.sinks)
    # The difference would be NaN for rows that see nothing.
    weights = (logits - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
    folded = weights.to(values.dtype).unflatten(1, (kv_heads, -1)).flatten(2, 3)
    return (folded @ values).unflatten(2, (-1, n)).flatten(1, 2), lse
