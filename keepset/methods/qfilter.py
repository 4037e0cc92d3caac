"""Q-Filters: keys that point where the model's queries point."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.feature import Needs
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores


@dataclass(frozen=True)
class QFilter(Method):
    """Keeps keys that reach far along the queries' main direction (Godey et al. 2025, arXiv:2503.02812).

    The direction is measured beforehand (`keepset calibrate`): of each query head the first right singular vector of
    its queries after rotation, with the sign that makes their mean projection positive, averaged over the query heads
    that share a KV head. Queries are not centred, and the average is not made a unit vector again, as in the authors'
    program; it takes the sign of most queries, the paper that of their mean, which is done here. Nothing stays by
    itself: the newest tokens that the authors' cache keeps apart are `recent=` here.

    Attributes:
        stats: a file of `keepset calibrate`; none for the embedded model's own, made on first use.
    """

    name = "qfilter"
    paper = "arXiv:2503.02812"

    stats: str = parameter("")

    @property
    def needs(self) -> Needs:
        return Needs(ModelStatistics(self.stats))

    def score(self, observation: Observation) -> Scores:
        direction = ModelStatistics(self.stats).repeat_per_request(observation).direction
        return observation.over_heads(
            lambda heads: (observation.keys_of(heads).float() @ direction[:, heads, :, None])[..., 0]
        )
