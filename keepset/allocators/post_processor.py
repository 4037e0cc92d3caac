"""Last steps of a recipe: `PostProcessor`, and `int8`, which stores the entries that stay in 8 bits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepset.core.budget import Budget
from keepset.core.feature import Needs
from keepset.core.features.runtime_features import Int8Entries
from keepset.core.keep_set import KeepSet, LayerKeepSet
from keepset.core.method import Allocator
from keepset.core.observation import Observation
from keepset.core.select import Ranking
from keepset.core.traits import FULL_BYTES, Traits


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


@dataclass(frozen=True)
class Int8(PostProcessor):
    """Stores what stays, and all tokens after it, as 8-bit integers: about half or a quarter of the bytes.

    It is the last step of a recipe, also around `match`: `int8(match(reread), keep=0.5)`. Every key and every value is
    rounded to multiples of a scale of its own, a 127th of its largest number. Attention multiplies by the scales. From
    the second event on, the methods inside see the rounded entries. `keep` counts entries as always.
    """

    name = "int8"
    stage = 2
    own_traits = Traits(
        needs=Needs(Int8Entries()), needs_budget=False, key_bits=8, value_bits=8, extra_bytes=2 * FULL_BYTES
    )

    def processed(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        itemsize = observation.dtype.itemsize
        return replace(kept, int8=True, entry_bytes=observation.entry_bytes // itemsize + 2 * itemsize)
