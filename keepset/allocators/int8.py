"""Int8: what stays is stored in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepset.allocators.post_processor import PostProcessor
from keepset.core.feature import Needs
from keepset.core.features.runtime_features import Int8Entries
from keepset.core.keep_set import LayerKeepSet
from keepset.core.observation import Observation


@dataclass(frozen=True)
class Int8(PostProcessor):
    """Stores what stays, and all tokens after it, as 8-bit integers: about half or a quarter of the bytes.

    The last step of a recipe, also around `match`: `int8(match(reread), keep=0.5)`. Every key and every value is
    rounded to multiples of a scale of its own, a 127th of its largest number. Attention multiplies by the scales; the
    methods inside see entries as they are then. `keep` counts entries as ever.
    """

    name = "int8"
    stage = 2

    @property
    def needs(self) -> Needs:
        return self.scorer.needs | Needs(Int8Entries())

    def rewritten(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        itemsize = observation.dtype.itemsize
        return replace(kept, int8=True, entry_bytes=observation.entry_bytes // itemsize + 2 * itemsize)
