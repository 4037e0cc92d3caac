"""Caches whose numbers have 8 bits: how they are read. Entries are moved as they lie there, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class EightBits:
    """How the numbers of a cache in 8 bits are read. They are moved as they are.

    Attributes:
        kind: of the numbers.
        keys, values: what a layer's are multiplied with; looked at whenever it is read.
        dtype: of what they are read as.
    """

    kind: torch.dtype
    keys: Float[Tensor, ""]
    values: Float[Tensor, ""]
    dtype: torch.dtype

    def read(self, numbers: Tensor, scale: Float[Tensor, "*shape"]) -> Float[Tensor, "*rows entries head_dim"]:
        """Numbers as what they stand for."""
        return numbers.view(self.kind).to(self.dtype).mul_(scale)
