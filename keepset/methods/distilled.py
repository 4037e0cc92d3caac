"""Distilled: keep what a small network, fitted to a slower method, scores highest by an entry's own key and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from keepset.core.feature import Needs
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.keep_set import LayerKeepSet
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.select import Ranking, top_mask
from keepset.core.shapes import Scores
from keepset.core.traits import Traits

_CODE = "code"
"""The name of the remembered codes (`keepset.kernels.predictor.encode`). An entry that was not scored has 0."""


@dataclass(frozen=True)
class Distilled(Method):
    """Scores an entry by a network that was fitted to another method's scores of such entries.

    `keepset calibrate --teacher reread --teacher prompt_queries` fits one small network per KV head to the mean of both
    teachers' logarithms. It reads the entry's key before rotation, its value and both norms: no query, no hidden
    state. So it takes one pass, and an entry goes through its network once, at its first event.
    The network gives two numbers: the entry's log score at a distance of 64 tokens from the end of the text, and how
    much each doubling of the distance adds. They are remembered, in 4 bytes per entry. A table adds a number that
    depends on the distance and the text's length, for all entries of the head alike.
    The method is keepset's own; KVzap (arXiv:2601.07891) fits such networks to the hidden states that enter attention.

    With a `threshold`, all entries with a lower score are dropped, and `keep` is a cap. A score is relative:
    1 is the geometric mean of the teacher's scores over all entries of the texts that were fitted to.

    Attributes:
        threshold: the lowest score that stays; 0 for a budget alone.
        stats: a file of `keepset calibrate --teacher`; "" for the embedded model's own, which comes with keepset.
    """

    name = "distilled"

    threshold: float = parameter(0.0, minimum=0.0)
    stats: str = parameter("")

    @cached_property
    def _statistics(self) -> ModelStatistics:
        return ModelStatistics(self.stats, predictors=True, rotates=True)

    @cached_property
    def traits(self) -> Traits:
        budget = self.threshold == 0
        return Traits(
            needs=Needs(self._statistics),
            sinks=4,  # which the fit leaves out
            recent=1,
            state_names=(_CODE,),
            equal_heads=budget,
            needs_budget=budget,
            counts_from_data=not budget,
        )

    @property
    def chooses(self) -> bool:
        return self.threshold != 0

    def score(self, observation: Observation) -> Scores:
        measured, lengths = self._statistics.repeat_per_request(observation), observation.lengths
        distances = lengths[:, None, None] - observation.positions
        return measured.scores_at(self._codes(observation), distances, lengths)

    def remember(self, observation: Observation, scores: Scores) -> Mapping[str, Tensor]:
        return {_CODE: self._codes(observation)}

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        if not self.threshold:
            return ranking.best()
        return ranking.keep(top_mask(ranking.scores, ranking.quotas) & (ranking.scores >= self.threshold))

    def _codes(self, observation: Observation) -> Scores:
        def make() -> Scores:
            return observation.codes_by(self._statistics.networks(observation), observation.state.get(_CODE))

        return observation.once((self, _CODE), make)
