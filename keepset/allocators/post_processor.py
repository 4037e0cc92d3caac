"""`PostProcessor`: a last step of a recipe, which changes how the entries that stay are stored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from keepset.core.budget import Budget
from keepset.core.keep_set import KeepSet, LayerKeepSet
from keepset.core.method import Allocator, Method
from keepset.core.observation import Observation
from keepset.core.select import Ranking
from keepset.core.traits import Traits


@dataclass(frozen=True)
class PostProcessor(Allocator):
    """Leaves another method's choice as it is, and changes how the chosen entries are stored.

    If there are several, the outermost runs first, so that those inside know how entries will be stored.
    """

    @property
    def own_traits(self) -> Traits:
        return Traits(needs_budget=False)  # the method inside says whether it needs one

    def check_scorer(self) -> None:
        """Accept every method: entries can be processed even if the budget cannot be divided again."""

    @abstractmethod
    def processed(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        """Return the same choice with this step's changes.

        Args:
            kept: the choice of the method inside.
        """

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        return self._all_processed(ranking.observation, self._chooser.choose(ranking))

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        chosen = self._chooser.select_all(observations, budget)
        if self.traits.across_layers:
            chosen.count()
        return KeepSet([self._all_processed(each, chosen.layer(each.layer_ids[0])) for each in observations])

    @property
    def _chooser(self) -> Method:
        """Return the method inside all post-processors."""
        return self.scorer._chooser if isinstance(self.scorer, PostProcessor) else self.scorer

    def _all_processed(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        kept = self.processed(observation, kept)
        return self.scorer._all_processed(observation, kept) if isinstance(self.scorer, PostProcessor) else kept
