"""Q-Filters: keep keys that point where the model's queries point."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from keepset.core.feature import Needs
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.core.traits import Traits


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
