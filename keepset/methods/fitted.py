"""Base classes of methods whose networks were fitted to another method's scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from keepset.core.features.hidden_scores import HiddenScores
from keepset.core.hidden_predictor import HiddenPredictor
from keepset.core.keep_set import LayerKeepSet
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.core.select import Ranking, top_mask
from keepset.core.shapes import Scores


class HiddenStateScorer(Method):
    """A method whose network reads the hidden state that enters a layer, once, when a token's entry is written.

    Attributes:
        network: the kind of network.
        stats: a file of statistics that holds the networks.
    """

    network: ClassVar[type[HiddenPredictor]]
    stats: str

    @property
    def _scores(self) -> HiddenScores:
        return HiddenScores(self.stats, self.network.kind)

    def score(self, observation: Observation) -> Scores:
        return observation[self._scores]

    def remember(self, observation: Observation, scores: Scores) -> Mapping[str, Tensor]:
        return {self._scores.column: scores.where(observation.valid, 0)}


class ThresholdScorer(Method):
    """A method that may choose by a threshold: entries with a lower score are dropped, and the budget is a cap.

    Attributes:
        threshold: the lowest score that stays; 0 for a budget alone.
    """

    threshold: float

    @property
    def chooses(self) -> bool:
        return self.threshold != 0

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        if not self.threshold:
            return ranking.best()
        return ranking.keep(top_mask(ranking.scores, ranking.quotas) & (ranking.scores >= self.threshold))
