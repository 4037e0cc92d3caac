"""H2O: keep the heavy hitters of the whole prompt's attention, and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepset.core.budget import Budget, share_of
from keepset.core.feature import Needs
from keepset.core.features.attention import AttentionColumns
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.select import RECENT_RANK, Ranking
from keepset.core.shapes import Quotas, Scores
from keepset.core.traits import Traits
from keepset.kernels.columns import ColumnStatistic

_RECEIVED = AttentionColumns(ColumnStatistic.SUM)


@dataclass(frozen=True)
class H2O(Method):
    """Keeps half heavy hitters, half newest tokens (Zhang et al. 2023, arXiv:2306.14048, algorithm 1).

    A heavy hitter's score is the attention that it received, summed over all queries of the prompt and over the query
    heads that share its KV head. The sums are streamed: no attention matrix exists.

    Attributes:
        recent_share: share of the budget that goes to the newest tokens; a half in the paper.
    """

    name = "h2o"
    paper = "arXiv:2306.14048"
    traits = Traits(needs=Needs(_RECEIVED))

    recent_share: float = parameter(0.5, minimum=0.0, maximum=1.0)

    def score(self, observation: Observation) -> Scores:
        return observation.by_query_group(observation[_RECEIVED]).sum(2)

    def ranked(self, observation: Observation, budget: Budget, quotas: Quotas) -> Ranking:
        ranking = super().ranked(observation, budget, quotas)
        newest = share_of(quotas, self.recent_share)
        is_newest = observation.positions >= observation.lengths[:, None, None] - newest[..., None]
        raised = ranking.scores.clamp(min=RECENT_RANK).where(is_newest & observation.valid, ranking.scores)
        return replace(ranking, scores=raised)
