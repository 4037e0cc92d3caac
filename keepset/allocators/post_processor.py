"""Rewriter: the base of steps that come after all choosing, and change what stays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from keepset.core.budget import Budget
from keepset.core.keep_set import KeepSet, LayerKeepSet
from keepset.core.method import Allocator
from keepset.core.observation import Observation
from keepset.core.select import Ranking


@dataclass(frozen=True)
class PostProcessor(Allocator):
    """Leaves another method's choice as it is, and says more of the entries that stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layout", "across_layers", "counts_from_data", "needs_budget"):
            object.__setattr__(self, name, getattr(self.scorer, name))

    def check_scorer(self) -> None:
        """Whatever cannot be divided again can still be rewritten."""

    @property
    def count_known_on_host(self) -> bool:
        return self.scorer.count_known_on_host

    @abstractmethod
    def rewritten(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        """The same choice, and what else there is to say of it.

        Args:
            observation: of the layer.
            kept: what the method inside has chosen of it.
        """

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        return self.rewritten(ranking.observation, self.scorer.choose(ranking))

    def select(self, observation: Observation, budget: Budget) -> KeepSet:
        return self.select_all([observation], budget)

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        chosen = self.scorer.select_all(observations, budget)
        if self.across_layers:
            chosen.count()
        return KeepSet([self.rewritten(each, chosen.layer(each.layer_ids[0])) for each in observations])
