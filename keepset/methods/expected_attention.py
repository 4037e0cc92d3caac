"""Expected attention: keep what future queries will attend to, by the distribution of the past ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.core.feature import Needs
from keepset.core.features.moments import QueryDistribution, QueryMoments
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.rope import positions_ahead
from keepset.core.shapes import Scores
from keepset.core.traits import Traits
from keepset.kernels.dispatch import CACHE_BLOCK, DEVICE_BLOCK
from keepset.kernels.softmax import normalised

_PARTS = 4


@dataclass(frozen=True)
class ExpectedAttention(Method):
    """Keeps what the next queries are expected to attend to (Devoto et al. 2025, arXiv:2510.00636).

    Queries before rotation are modelled as Gaussian, N(m, C) per query head. R is the mean rotation of the next
    `future` positions. An entry's expected unnormalised attention is exp(k·Rm/√d + k·RCR'·k/2d). It is normalised over
    the entries, averaged over the query group, and weighted with the value's norm: (attention + epsilon) · ‖v‖.

    If a model caps its logits (Gemma 2), the logarithm of the expectation is capped, so that it is at most the cap, as
    it would be for capped logits.

    Attributes:
        future: how many coming positions the rotation is averaged over.
        skip: first tokens, attention sinks, that are left out of the statistics and always stay.
        covariance: whether to use the second-order term.
        value_norm: whether to weight with the norm of the values.
        epsilon: added before the weighting, so that entries without expected attention differ by their values.
            kvpress' leaderboard and AMS's baselines (its appendix) use 0.01. The class in kvpress has 0 by default,
            with which hardly any fact is found that is asked for later (docs/results.md).
        stats: a file of `keepset calibrate`. Its mean and covariance are used instead of the text's own, whatever
            `skip` is; the file leaves out the first four tokens of its texts. The authors' "with statistics".
        buffer: how many of the newest queries the statistics cover while decoding (`every=`). The event's own query is
            one of them, and none is from before the previous event; 0 takes only the event's own query. The authors'
            program keeps that many hidden states in addition to the event's own, and empties its buffer at every
            event. The statistics of a prompt always cover all of it.
    """

    name = "expected_attention"
    advice = (
        "has an epsilon of 0.01, which is for facts that are asked for later: expected_attention(epsilon=0.0) is "
        "nearer to a text that goes on, and finds hardly any of them"
    )
    paper = "arXiv:2510.00636"

    future: int = parameter(512, minimum=1)
    skip: int = parameter(4, minimum=0)
    covariance: bool = parameter(True)
    value_norm: bool = parameter(True)
    epsilon: float = parameter(0.01, minimum=0.0)
    buffer: int = parameter(256, minimum=0)
    stats: str = parameter("")

    @cached_property
    def traits(self) -> Traits:
        measured = ModelStatistics(self.stats, covariances=self.covariance, rotates=True)
        moments = measured if self.stats else QueryMoments(self.skip, max(self.buffer, 1))
        return Traits(needs=Needs(moments), sinks=self.skip)

    def score(self, observation: Observation) -> Scores:
        moments = self._measured(observation) if self.stats else observation[QueryMoments(self.skip)]
        mean, covariance = moments.ahead(self.future)
        scaling, sinks = observation.scaling, observation.sinks
        vectors = observation.by_query_group(mean * scaling)
        matrices = observation.by_query_group(covariance * (0.5 * scaling**2)) if self.covariance else None

        def look(heads: slice) -> Tensor:
            of_heads = None if matrices is None else matrices[:, heads]
            return _expected_logits(observation.keys_of(heads), vectors[:, heads], of_heads)

        logits = observation.softmax.capped(observation.over_heads(look))
        counted = observation.valid & (observation.positions >= self.skip)
        logits = logits.masked_fill(~counted[..., None], float("-inf"))
        if sinks is None:
            attention = logits.softmax(-2)
        else:
            attention = normalised(logits.transpose(-1, -2), sinks).transpose(-1, -2)
        attention = attention.nan_to_num(nan=0.0).mean(-1)
        if not self.value_norm:
            return attention

        def norm(heads: slice) -> Tensor:
            values = observation.values_of(heads)
            return torch.linalg.vector_norm(values, dim=-1, dtype=torch.promote_types(values.dtype, torch.float32))

        return (attention + self.epsilon) * observation.over_heads(norm)

    def _measured(self, observation: Observation) -> QueryDistribution:
        measured, lengths = ModelStatistics(self.stats).repeat_per_request(observation), observation.lengths
        return QueryDistribution(
            measured.mean,
            measured.covariance,
            lambda rows, future: measured.rotate(rows, positions_ahead(lengths, future)),
        )


def _expected_logits(
    keys: Float[Tensor, "batch kv_heads entries head_dim"],
    vectors: Float[Tensor, "batch kv_heads group head_dim"],
    matrices: Float[Tensor, "batch kv_heads group head_dim head_dim"] | None,
) -> Float[Tensor, "batch kv_heads entries group"]:
    """Return k m + k C k' for every key k with its head's vectors m and matrices C, in float32.

    It is computed in blocks of entries. On a CPU a block stays in a core's cache; elsewhere there are few blocks, whose
    memory does not grow with the entries. C and its transpose give the same number, so the part below the diagonal is
    added to the part above it, and most of the lower half is never multiplied.

    Args:
        keys: after rotation.
        vectors: the mean query of each head.
        matrices: the covariance of each head's queries; None for 0.
    """
    batch, heads, entries, size = keys.shape
    group, width = vectors.shape[2], -(-size // _PARTS)
    # For each block of columns: the rows down to the diagonal, with the matrices of a group side by side.
    columns = [slice(start, min(start + width, size)) for start in range(0, size, width)]
    parts: list[tuple[slice, Tensor]] = []
    if matrices is not None:
        symmetric = matrices + matrices.transpose(-1, -2)
        upper = symmetric.triu(1) + torch.diag_embed(matrices.diagonal(dim1=-2, dim2=-1))
        parts = [(part, upper[..., : part.stop, part].transpose(2, 3).flatten(3)) for part in columns]
    if keys.device.type == "cpu":
        # Independent of the batch, because other blocks would round differently.
        rows = max(1, CACHE_BLOCK // (heads * size))
    else:
        rows = max(1, DEVICE_BLOCK // (batch * heads * max(size, group * width)))
    logits = vectors.new_empty(batch, heads, entries, group)
    for stored, logit in zip(keys.split(rows, 2), logits.split(rows, 2), strict=True):
        block = stored.float()
        logit.copy_(block @ vectors.transpose(-1, -2))
        for part, matrix in parts:
            product = (block[..., : part.stop] @ matrix).unflatten(-1, (group, -1))
            logit.add_(product.mul_(block[..., None, part]).sum(-1))
            del product  # before the next one is allocated
        del block
    return logits
