"""Allocators within a layer: Uniform, AdaKV, CriticalKV and ChunkKV."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from keepset.core.budget import share_of
from keepset.core.feature import Needs
from keepset.core.features.runtime_features import OutputProjection
from keepset.core.keep_set import LayerKeepSet
from keepset.core.method import Allocator, Method, parameter
from keepset.core.select import LARGEST_SCORE, RECENT_RANK, Ranking, round_to_total, top_mask
from keepset.core.shapes import Quotas
from keepset.core.traits import Traits

_EPSILON = 1e-4


@dataclass(frozen=True)
class Uniform(Allocator):
    """Gives every layer and head the same number of entries, as a scorer alone does."""

    name = "uniform"


@dataclass(frozen=True)
class AdaKV(Allocator):
    """Divides a layer's budget among its heads by where the best scores are (Feng et al. 2024, arXiv:2407.11550).

    Algorithm 1: the best entries of all heads together give each head's adaptive number. A share `floor` of every
    head's budget stays uniform (the safeguard, 0.2 in the authors' program). A layer keeps exactly heads x budget, and
    each request is divided by itself. After an event a head may hold less than its share; what it cannot take goes to
    the others.

    Attributes:
        floor: the share of its budget that a head keeps in any case.
        safeguard: "mix", as in the authors' program: a head's number is a mix of its adaptive and its uniform share.
            "least", as in kvpress and the program of AMS' authors: each head keeps its best, a share
            `floor` of its quota and at least one, and the best of all others fill the budget.
    """

    name = "adakv"
    paper = "arXiv:2407.11550"
    own_traits = Traits(equal_heads=False)

    floor: float = parameter(0.2, minimum=0.0, maximum=1.0)
    safeguard: str = parameter("mix", choices=("mix", "least"))

    def objection(self, inner: Method) -> str:
        # `_filled` would take a head with a smaller quota for one that holds less.
        twice = "adakv: one inside another would divide again what its heads were given: use it once."
        return twice if isinstance(inner, AdaKV) else ""

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        scores = ranking.scores
        quotas = _filled(ranking.quotas, scores.isneginf().logical_not().sum(-1))
        total = quotas.sum(-1)
        # Entry after entry, all heads of each: heads then share equal scores, and the last head does not take them all.
        pool = scores.transpose(1, 2)
        if self.safeguard == "least" and self.floor > 0:
            least = share_of(quotas, self.floor).clamp(min=1).minimum(quotas)
            pool = pool.masked_fill(top_mask(scores, least).transpose(1, 2), float("inf"))
        adaptive = top_mask(pool.flatten(1), total).view_as(pool).sum(1)
        if self.safeguard == "least":
            return self.scorer.choose(replace(ranking, quotas=adaptive))
        shares = torch.lerp(adaptive.double(), quotas.double(), self.floor)
        return self.scorer.choose(replace(ranking, quotas=round_to_total(shares, total)))


def _filled(quotas: Quotas, existing: Quotas) -> Quotas:
    """Return quotas that sum to what all heads may keep together, though some hold less than their share.

    The largest quota is the share of every head, cut to what a head holds. Otherwise heads that got little at one event
    would shrink the layer at the next.

    Args:
        quotas: of each head.
        existing: entries that each head holds.
    """
    total = torch.minimum(quotas.amax(-1) * quotas.shape[-1], existing.sum(-1))
    quotas = quotas.minimum(existing)
    missing, room = total - quotas.sum(-1), existing - quotas
    shares = room * (missing.double() / room.sum(-1).clamp(min=1))[:, None]
    return quotas + round_to_total(shares, missing)


@dataclass(frozen=True)
class CriticalKV(Allocator):
    """Chooses in two stages, so that what is dropped perturbs the output little (Feng et al. 2025, arXiv:2502.03805).

    Algorithm 1: a share `alpha` of a head's entries are the best by the scorer. The rest are the best by score times
    the L1 norm of the projected value `W_O v`. As in the authors' program, the norm is the mean over the query heads
    that share a KV head, 1e-4 is added to the score, and what always stays counts towards the first stage. AdaKV
    around it divides a layer by the scores alone: `adakv(criticalkv(snapkv))`. The first stage is rounded down. Scores
    that are no attention may be negative: a head's scores are then raised until none is.
    """

    name = "criticalkv"
    paper = "arXiv:2502.03805"
    chooses_alone = True
    own_traits = Traits(needs=Needs(OutputProjection()))

    alpha: float = parameter(0.5, minimum=0.0, maximum=1.0)

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        ranked, observation = ranking.scores, ranking.observation
        first = top_mask(ranked, share_of(ranking.quotas, self.alpha))
        norms = observation.by_query_group(OutputProjection().norms(observation, 1)).mean(2)
        scored = (ranked.abs() <= LARGEST_SCORE) & ~norms.isnan()
        lowest = ranked.where(scored, 0.0).amin(-1, keepdim=True).clamp(max=0.0)
        weighed = ((ranked - lowest + _EPSILON) * norms).clamp(max=LARGEST_SCORE)
        order = weighed.where(scored, ranked.clamp(max=-LARGEST_SCORE)).masked_fill(first, RECENT_RANK)
        return ranking.keep(top_mask(order.where(ranked < RECENT_RANK, ranked), ranking.quotas))


@dataclass(frozen=True)
class ChunkKV(Allocator):
    """Keeps whole chunks, those with the best mean score first (Liu et al. 2025, arXiv:2502.00299).

    The existing entries are cut into chunks of `chunk` consecutive ones. From the chunk that would exceed the quota
    only the best entries of each head stay, so that the number is exact. What always stays is taken first and counts in
    no chunk's mean. KV heads rank chunks together, by the mean over heads, as in the authors' program (which sums).
    Heads that hold different entries, as inside `adakv` after an event, rank chunks by themselves. The paper's reuse
    of chosen chunks in neighbouring layers is left out: it saves time and no memory.
    """

    name = "chunkkv"
    paper = "arXiv:2502.00299"
    chooses_alone = True

    chunk: int = parameter(20, minimum=1)

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        entries = ranking.scores.shape[-1]
        padded = F.pad(ranking.scores.double(), (0, -entries % self.chunk), value=float("-inf"))
        chunks = padded.unflatten(-1, (-1, self.chunk))
        counted = (chunks < RECENT_RANK) & ~chunks.isneginf()
        mean = ranking.observation.mean_over_heads(chunks.masked_fill(~counted, 0.0).sum(-1)) / counted.sum(-1)
        # In both orders the later of equal ones is better, as everywhere. Chunks without entries do not count.
        best = mean.argsort(dim=-1, stable=True).argsort(dim=-1)
        within = chunks.argsort(dim=-1, stable=True).argsort(dim=-1)
        order = (best[..., None] * self.chunk + within).double().where(counted, chunks)
        return ranking.keep(top_mask(order.flatten(-2)[..., :entries], ranking.quotas))
