"""How caches of 8-bit numbers are read. Entries are moved as they are stored, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class EightBits:
    """How a layer's numbers of 8 bits are read.

    Attributes:
        kind: the type of the stored numbers.
        keys, values: the scales of keys and of values. They are looked up whenever the cache is read.
        dtype: the type that they are read as.
    """

    kind: torch.dtype
    keys: Float[Tensor, ""]
    values: Float[Tensor, ""]
    dtype: torch.dtype

    def read(self, numbers: Tensor, scale: Float[Tensor, "*shape"]) -> Float[Tensor, "*rows entries head_dim"]:
        """Return what stored numbers stand for.

        Args:
            numbers: the numbers as they are stored.
            scale: their scale, broadcast to their shape.
        """
        return numbers.view(self.kind).to(self.dtype).mul_(scale)
