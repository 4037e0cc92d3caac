"""H2O: heavy hitters of the whole prompt's attention, and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.budget import Budget
from keepset.core.method import Method, parameter
from keepset.core.observation import Needs, Observation
from keepset.core.select import RECENT_RANK


@dataclass(frozen=True)
class H2O(Method):
    """Keeps half heavy hitters, half newest tokens (Zhang et al. 2023, arXiv:2306.14048, algorithm 1).

    A heavy hitter's score is the attention that it received, summed over all queries of the prompt (and
    the query heads that share its KV head). The sums are streamed: no attention matrix exists.

    Attributes:
        recent_share: share of the budget that goes to the newest tokens; the paper halves it.
    """

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "arXiv:2306.14048"

    recent_share: float = parameter(0.5, minimum=0.0, maximum=1.0)

    @property
    def needs(self) -> Needs:
        """Column sums of the prompt's attention."""
        return Needs(columns=frozenset({"sum"}))

    def score(self, observation: Observation) -> Float[Tensor, "batch kv_heads entries"]:
        """Attention received."""
        return observation.by_query_group(observation.columns("sum")).sum(2)

    def ranked(
        self, observation: Observation, budget: Budget, quotas: Int[Tensor, "batch kv_heads"]
    ) -> Float[Tensor, "batch kv_heads entries"]:
        """The newest share of the quota above every heavy hitter."""
        ranked = super().ranked(observation, budget, quotas)
        # As in Budget: 0.29 * 100 is 28.999...96 in binary.
        newest = (quotas.double() * self.recent_share + 1e-9).floor().long()
        is_newest = observation.positions >= observation.lengths[:, None, None] - newest[..., None]
        return ranked.clamp(min=RECENT_RANK).where(is_newest & observation.valid, ranked)
