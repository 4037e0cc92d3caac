"""CriticalKV: half of a head's entries by score, half by how much they change the layer's output."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.budget import share_of
from keepset.core.feature import Needs
from keepset.core.features.runtime_features import OutputProjection
from keepset.core.keep_set import LayerKeepSet
from keepset.core.method import Allocator, parameter
from keepset.core.select import LARGEST_SCORE, RECENT_RANK, Ranking, top_mask
from keepset.core.traits import Traits

_EPSILON = 1e-4


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
