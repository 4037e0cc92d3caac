"""Int8: the entries that stay are stored in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepset.allocators.post_processor import PostProcessor
from keepset.core.feature import Needs
from keepset.core.features.runtime_features import Int8Entries
from keepset.core.keep_set import LayerKeepSet
from keepset.core.observation import Observation
from keepset.core.traits import Traits


@dataclass(frozen=True)
class Int8(PostProcessor):
    """Stores what stays, and all tokens after it, as 8-bit integers: about half or a quarter of the bytes.

    It is the last step of a recipe, also around `match`: `int8(match(reread), keep=0.5)`. Every key and every value is
    rounded to multiples of a scale of its own, a 127th of its largest number. Attention multiplies by the scales. From
    the second event on, the methods inside see the rounded entries. `keep` counts entries as always.
    """

    name = "int8"
    stage = 2
    own_traits = Traits(needs=Needs(Int8Entries()), needs_budget=False)

    def processed(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        itemsize = observation.dtype.itemsize
        return replace(kept, int8=True, entry_bytes=observation.entry_bytes // itemsize + 2 * itemsize)
