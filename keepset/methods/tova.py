"""TOVA: keep what the newest token attends to."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.feature import Needs
from keepset.core.features.runtime_features import RecentQueries
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.core.traits import Traits


@dataclass(frozen=True)
class TOVA(Method):
    """Keeps what the newest query attends to, averaged over all heads (Oren et al. 2024, arXiv:2401.06104).

    As in the paper's section 3.2, the heads of a layer share one set of tokens. Where `adakv` or `ams` has given them
    different ones, each KV head goes by its own query heads. The newest token itself always stays.
    """

    name = "tova"
    paper = "arXiv:2401.06104"
    traits = Traits(needs=Needs(RecentQueries(1)), recent=1)

    def score(self, observation: Observation) -> Scores:
        return observation.mean_over_heads(observation.by_query_group(observation.window_usage(1)).mean(2))
