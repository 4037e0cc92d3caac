"""`PostProcessor`: a last step of a recipe, which changes how the entries that stay are stored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from keepset.core.budget import Budget
from keepset.core.keep_set import KeepSet, LayerKeepSet
from keepset.core.method import Allocator
from keepset.core.observation import Observation
from keepset.core.select import Ranking
from keepset.core.traits import Traits


@dataclass(frozen=True)
class PostProcessor(Allocator):
    """Leaves another method's choice as it is, and changes how the chosen entries are stored."""

    @property
    def own_traits(self) -> Traits:
        return Traits(needs_budget=False)  # the method inside says whether it needs one

    def check_scorer(self) -> None:
        """Accept every method: also a budget that cannot be divided again leaves entries to process."""

    @abstractmethod
    def processed(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        """Return the same choice with what this step changes about it.

        Args:
            observation: the layer.
            kept: what the method inside has chosen of it.
        """

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        return self.processed(ranking.observation, self.scorer.choose(ranking))

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        chosen = self.scorer.select_all(observations, budget)
        if self.traits.across_layers:
            chosen.count()
        return KeepSet([self.processed(each, chosen.layer(each.layer_ids[0])) for each in observations])
