"""Quantized: store the entries that stay in few bits."""

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
    value is mixed by an orthogonal matrix and has its own scale (`kernels/entry_format.py`). In 8 bits the mixed
    numbers are rounded to multiples of the scale, in 4 bits to levels for a normal distribution. In 4 bits, new tokens
    have a residual of 4 more bits for the rounding error, which the next event drops. From the second
    event on, the methods inside see rounded entries. `keep` counts entries as always. `int8(...)` is another spelling
    of `quantized(..., bits=8)`.

    Attributes:
        bits: bits of each number of a key or value; None for 4 if the budget is below `bytes=0.075`, else 8.
    """

    name = "quantized"
    stage = 2

    bits: int | None = parameter(None, choices=(8, 4))

    def for_bytes(self, share: float | None) -> Quantized:
        return replace(self, bits=_bits_for(share)) if self.bits is None else self

    def without_bytes(self, share: float | None) -> Quantized:
        return replace(self, bits=None) if self.bits == _bits_for(share) else self

    @property
    def own_traits(self) -> Traits:
        bits = self.bits or _bits_for(None)
        return replace(
            super().own_traits,
            needs=Needs(QuantizedEntries(bits)),
            key_bits=bits,
            value_bits=bits,
            extra_bytes=2 * FULL_BYTES,
        )

    def processed(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        bits, sizes = self.traits.key_bits, (observation.head_dim, observation.value_dim)
        if bits == 4 and any(size % 2 for size in sizes):
            raise KeepsetError(
                f"Two numbers of 4 bits share a byte, and this model's keys and values have {sizes[0]} and {sizes[1]} "
                "numbers: use bits=8."
            )
        rows = sum(-(-bits * size // 8) for size in sizes)
        return replace(kept, bits=bits, entry_bytes=rows + 2 * observation.dtype.itemsize)


FEW_BYTES = 0.075
"""The share of a full 16-bit cache's bytes below which many entries in 4 bits are nearer to it than fewer in 8."""


def _bits_for(share: float | None) -> int:
    return 4 if share is not None and share < FEW_BYTES else 8
