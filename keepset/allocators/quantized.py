"""Quantized: the entries that stay are stored in few bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepset.allocators.post_processor import PostProcessor
from keepset.core.feature import Needs
from keepset.core.features.runtime_features import QuantizedEntries
from keepset.core.keep_set import LayerKeepSet
from keepset.core.method import parameter
from keepset.core.observation import Observation
from keepset.core.traits import FULL_BYTES, Traits
from keepset.errors import KeepsetError


@dataclass(frozen=True)
class Quantized(PostProcessor):
    """Stores what stays, and all tokens after it, in 8 or 4 bits a number, with a scale for each key and value.

    It is the last step of a recipe, also around `match`: `quantized(match(reread), keep=0.5)`. Every key and every
    value has a scale of its own. In 8 bits its numbers are multiples of the scale. In 4 bits they are mixed by an
    orthogonal matrix first and put on the levels of a normal distribution (`kernels/entry_format.py`). New tokens then
    have a second layer of 4 bits for what the first has lost, which the next event drops. From the second event on, the
    methods inside see rounded entries. `keep` counts entries as always. `int8(...)` is another spelling of
    `quantized(..., bits=8)`.

    Attributes:
        bits: of each number of a key or value.
    """

    name = "quantized"
    stage = 2

    bits: int = parameter(8, choices=(8, 4))

    @property
    def own_traits(self) -> Traits:
        return replace(
            super().own_traits,
            needs=Needs(QuantizedEntries(self.bits)),
            key_bits=self.bits,
            value_bits=self.bits,
            extra_bytes=2 * FULL_BYTES,
        )

    def processed(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        if self.bits == 4 and (observation.head_dim % 2 or observation.value_dim % 2):
            raise KeepsetError(
                f"Two numbers of 4 bits share a byte, and this model's keys and values have {observation.head_dim} and "
                f"{observation.value_dim}: use bits=8."
            )
        rows = sum(-(-self.bits * size // 8) for size in (observation.head_dim, observation.value_dim))
        return replace(kept, bits=self.bits, entry_bytes=rows + 2 * observation.dtype.itemsize)
