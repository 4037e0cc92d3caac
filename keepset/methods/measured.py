"""Methods that read measurements of a model: Q-Filters, DuoAttention and TriAttention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.core.budget import Budget, share_of
from keepset.core.feature import Needs
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Quotas, Scores
from keepset.core.sizes import Sizes
from keepset.core.statistics import RowStatistics
from keepset.core.traits import Traits

_BLOCK = 2**14
"""The most entries that are scored at a time."""


@dataclass(frozen=True)
class QFilter(Method):
    """Keeps keys that reach far along the queries' main direction (Godey et al. 2025, arXiv:2503.02812).

    The direction is measured beforehand (`keepset calibrate`). It is the first right singular vector of each query
    head's queries after rotation, with the sign that makes their mean projection positive, averaged over the query
    heads that share a KV head. As in the authors' program, queries are not centred, and the average is not made a unit
    vector again. The program takes the sign of most queries; here it is that of their mean, as in the paper. No tokens
    always stay by default: write `recent=` for the newest tokens, which the authors' cache keeps apart.

    Attributes:
        stats: a file of `keepset calibrate`; "" for the embedded model's own, which is made on first use.
    """

    name = "qfilter"
    paper = "arXiv:2503.02812"

    stats: str = parameter("")

    @cached_property
    def traits(self) -> Traits:
        return Traits(needs=Needs(ModelStatistics(self.stats)))

    def score(self, observation: Observation) -> Scores:
        direction = ModelStatistics(self.stats).repeat_per_request(observation).direction
        return observation.over_heads(
            lambda heads: (observation.keys_of(heads).float() @ direction[:, heads, :, None])[..., 0]
        )


@dataclass(frozen=True)
class DuoAttention(Method):
    """Retrieval heads keep all, streaming heads sinks and recent tokens (Xiao et al. 2024, arXiv:2410.10819).

    `keepset calibrate` measures beforehand which heads retrieve: it trains gates between full and streaming attention
    as the authors do, but in fewer steps and on shorter texts; `stats` names the file. `keep` decides how many heads
    retrieve: the KV heads with the highest gates, over all layers, as many as fit while the others keep their sinks
    and recent tokens. The remaining entries make the streaming heads' recent part longer, so that the total is exact.
    If the budget is no more than all heads' sinks and recent tokens, no head retrieves.

    There are 16 sinks and 64 recent tokens, as when the gates were measured; the authors have 128 and 256 for longer
    texts, and a fixed share of retrieval heads instead of a budget. Only gates and lengths decide, so each layer can
    be compressed by itself. With `every=` fewer heads retrieve as the text grows, and a head that holds less than it
    could keeps what it has.

    Attributes:
        stats: a file of `keepset calibrate`; "" for the embedded model's own.
    """

    name = "duo_attention"
    paper = "arXiv:2410.10819"

    stats: str = parameter("")

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            needs=Needs(ModelStatistics(self.stats)),
            sinks=16,  # as the gates were measured, and so are the recent tokens
            recent=64,
            equal_heads=False,
            equal_layers=False,  # a layer keeps more if more of its heads retrieve
            counts_from_files=True,
        )

    def score(self, observation: Observation) -> Scores:
        ModelStatistics(self.stats).checked(observation)
        return observation.positions.float()

    def quotas(self, sizes: Sizes, budget: Budget) -> Quotas:
        gates = ModelStatistics(self.stats).retrieval(sizes)
        existing, lengths, heads = sizes.entries, sizes.lengths, gates.numel()
        if budget.keep is None:
            return budget.quotas(sizes)
        if isinstance(budget.keep, float):
            lengths = existing.amax(-1)
            always = budget.always(sizes).clamp(min=1).minimum(lengths) * heads
            total = (share_of(lengths * heads, budget.keep) + budget.extra(sizes) * heads).maximum(always)
        else:
            total = budget.aim(sizes).minimum(lengths) * heads
        least = budget.always(sizes).minimum(lengths).minimum(total // heads)
        movable, left = lengths - least, total - least * heads
        whole = (left // movable.clamp(min=1)).clamp(max=heads)
        left = left - whole * movable
        streaming = (heads - whole).clamp(min=1)
        # With equal gates the earlier head retrieves.
        ranks = gates.flatten().argsort(descending=True, stable=True).argsort().view_as(gates)[sizes.depths]
        whole, least, left, streaming, movable = (part[:, None] for part in (whole, least, left, streaming, movable))
        counts = least + left // streaming + (ranks - whole < left % streaming).long()
        return counts.where(ranks >= whole, least + movable).minimum(existing)


@dataclass(frozen=True)
class TriAttention(Method):
    """Scores keys by their distance from the queries' centre and by their norm (Mao et al. 2026, arXiv:2604.04921).

    With k a key and c the mean of a head's queries, both before rotation, k_f and c_f their parts in the plane of
    frequency w_f, and d the distance from a key to a future query, an entry's score is the sum over f of
    |c_f| |k_f| cos(w_f d + angle from k_f to c_f), averaged over d, plus (1 - R_f) E|q_f| |k_f|, where the mean
    resultant length R_f = |c_f| / E|q_f| says how concentrated the queries are. The cosine series is the product of the
    cached key with the centre rotated ahead, so keys need not be un-rotated. Centre and norms are measured
    beforehand (`keepset calibrate`).

    As in the authors' program, distances are from the request's length plus 1, 2, 4 ... up to `horizon`, a query head's
    scores are standardised over the entries, and an entry gets the largest over the query heads that share its KV head.
    Each layer and head decides by itself, as under the program's `--per-layer-perhead-pruning`; its command averages
    over layers by default. Where the paper is silent: each number that a model does not rotate counts as a plane of
    frequency 0, and statistics leave out the first four tokens of each text. The authors keep the prompt; here it is
    compressed too (`prefill=False, every=128` waits until it is over). No tokens always stay by default.

    Attributes:
        horizon: the distance of the farthest future query, in tokens.
        stats: a file of `keepset calibrate`; "" for the embedded model's own, which is made on first use.
    """

    name = "triattention"
    paper = "arXiv:2604.04921"

    horizon: int = parameter(65536, minimum=1, maximum=2**30)
    stats: str = parameter("")

    @cached_property
    def traits(self) -> Traits:
        return Traits(needs=Needs(ModelStatistics(self.stats, rotates=True)))

    def score(self, observation: Observation) -> Scores:
        measured = ModelStatistics(self.stats).repeat_per_request(observation)
        offsets = 2 ** torch.arange(self.horizon.bit_length(), device=observation.valid.device)
        ahead = measured.rotate(measured.mean[:, :, None], observation.lengths[:, None] + offsets)[:, :, 0]
        series = observation.by_query_group(ahead).transpose(-1, -2)
        spread = observation.by_query_group(_spread(measured)).transpose(-1, -2)

        def look(heads: slice) -> Tensor:
            blocks = (keys.float() for keys in observation.keys_of(heads).split(_BLOCK, 2))
            return torch.cat([k @ series[:, heads] + measured.in_plane(k) @ spread[:, heads] for k in blocks], 2)

        return _standardised(observation.over_heads(look), observation).amax(-1)


def _spread(measured: RowStatistics) -> Float[Tensor, "batch query_heads head_dim"]:
    """Return (1 - R) E|q| of each number's plane, times the gain of queries; cached keys contain their gain already."""
    excess = (measured.norm - measured.in_plane(measured.mean)) * measured.gain[:, None]
    return excess / (1 + measured.paired[:, None].float())  # A plane occurs twice, once for each of its numbers.


def _standardised(
    scores: Float[Tensor, "batch kv_heads entries group"], observation: Observation
) -> Float[Tensor, "batch kv_heads entries group"]:
    """Return each query head's scores minus their mean, divided by their deviation, over entries with finite scores.

    Args:
        scores: of each query head.
        observation: says which entries exist.
    """
    counted = observation.valid[..., None] & scores.isfinite()
    count = counted.sum(2, keepdim=True).clamp(min=1)
    mean = scores.where(counted, 0.0).sum(2, keepdim=True) / count
    deviation = ((scores - mean).where(counted, 0.0).square().sum(2, keepdim=True) / count).sqrt()
    return (scores - mean) / deviation.clamp(min=1e-6)
