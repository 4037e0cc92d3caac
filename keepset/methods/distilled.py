"""Distilled: keep what a small network, fitted to a dearer method, finds in an entry's own key and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from keepset.core.feature import Needs
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.method import parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.core.traits import Traits
from keepset.methods.fitted import ThresholdScorer

_WORTH = "worth"
"""The name of what is remembered: the score without what the age is worth. An entry that was not scored has 0."""


@dataclass(frozen=True)
class Distilled(ThresholdScorer):
    """Scores an entry by a network that was fitted to another method's scores of such entries.

    `keepset calibrate --teacher reread --teacher prompt_queries` fits one small network per KV head to the mean of both
    teachers' logarithms. It reads the entry's key before rotation and its value, and nothing else: no query, no hidden
    state. So it takes one pass, and an entry goes through its network once, when the first event looks at it. What it
    says is remembered, 4 bytes an entry. Only what the distance from the end of the text is worth to the head changes
    as the text grows: a number of a table over distances and lengths, a factor of the score.
    The method is keepset's own; KVzap (arXiv:2601.07891) fits such networks to the hidden states that enter attention.

    With a `threshold`, entries with a lower score go, whatever their number, and `keep` is a cap. A score is relative:
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
            sinks=4,
            recent=8,
            state_names=(_WORTH,),
            equal_heads=budget,
            needs_budget=budget,
            counts_from_data=not budget,
        )

    def score(self, observation: Observation) -> Scores:
        networks = self._statistics.networks(observation)
        return observation.predicted(networks, observation.state.get(_WORTH)) * self._by_age(observation)

    def remember(self, observation: Observation, scores: Scores) -> Mapping[str, Tensor]:
        worth, known = scores / self._by_age(observation), observation.state.get(_WORTH)
        worth = worth if known is None else known.where(known != 0, worth)
        return {_WORTH: worth.where(observation.valid, 0)}

    def _by_age(self, observation: Observation) -> Scores:
        """Return the factor of each entry's distance from the end of the text."""

        def make() -> Scores:
            measured = self._statistics.repeat_per_request(observation)
            lengths = observation.lengths
            return measured.by_age(lengths[:, None, None] - observation.positions, lengths).exp()

        return observation.once((self, "age"), make)
