"""AdaKV: the heads of a layer share one budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from keepset.core.budget import share_of
from keepset.core.keep_set import LayerKeepSet
from keepset.core.method import Allocator, Method, parameter
from keepset.core.select import Ranking, round_to_total, top_mask
from keepset.core.shapes import Quotas
from keepset.core.traits import Traits


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
    """
    total = torch.minimum(quotas.amax(-1) * quotas.shape[-1], existing.sum(-1))
    quotas = quotas.minimum(existing)
    missing, room = total - quotas.sum(-1), existing - quotas
    shares = room * (missing.double() / room.sum(-1).clamp(min=1))[:, None]
    return quotas + round_to_total(shares, missing)
