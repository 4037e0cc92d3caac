"""`Preset`: other methods put together, under a name of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

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

    layout: ClassVar[Layout] = Layout.HEAD_RAGGED
    across_layers: ClassVar[bool] = True
    counts_from_data: ClassVar[bool] = True

    @property
    @abstractmethod
    def composition(self) -> Method:
        """What it is made of."""

    @property
    def needs(self) -> Needs:
        """What its parts look at."""
        return self.composition.needs

    @property
    def equal_layers(self) -> bool:
        """As in what it is made of."""
        return self.composition.equal_layers

    @property
    def equal_heads(self) -> bool:
        """As in what it is made of."""
        return self.composition.equal_heads

    @property
    def sinks(self) -> int:
        """As what it is made of."""
        return self.composition.sinks

    @property
    def recent(self) -> int:
        """As what it is made of."""
        return self.composition.recent

    def score(self, observation: Observation) -> Scores:
        """As what it is made of."""
        return self.composition.score(observation)

    def select(self, observation: Observation, budget: Budget) -> KeepSet:
        """What stays of one layer that is alone."""
        return self.composition.select(observation, budget)

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        """What stays of all layers."""
        return self.composition.select_all(observations, budget)
