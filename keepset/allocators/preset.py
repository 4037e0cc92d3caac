"""`Preset`: other methods put together, under a name of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from keepset.core.budget import Budget
from keepset.core.feature import Needs
from keepset.core.keep_set import KeepSet, Layout
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.core.shapes import Scores


class Preset(Method):
    """Other methods put together under a name of its own: decides as its `composition` does.

    A subclass defines `composition`, and parameters of its own where its paper has some.
    """

    layout = Layout.HEAD_RAGGED
    across_layers = True
    counts_from_data = True

    @property
    @abstractmethod
    def composition(self) -> Method:
        """What it is made of."""

    @property
    def needs(self) -> Needs:
        return self.composition.needs

    @property
    def equal_layers(self) -> bool:
        return self.composition.equal_layers

    @property
    def equal_heads(self) -> bool:
        return self.composition.equal_heads

    @property
    def sinks(self) -> int:
        return self.composition.sinks

    @property
    def recent(self) -> int:
        return self.composition.recent

    def score(self, observation: Observation) -> Scores:
        return self.composition.score(observation)

    def select(self, observation: Observation, budget: Budget) -> KeepSet:
        return self.composition.select(observation, budget)

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        return self.composition.select_all(observations, budget)
