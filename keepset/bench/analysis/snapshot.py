"""`Snapshot`: what one event kept, and how long the texts were by then. Diagnostics read nothing else of a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepset.core.keep_set import KeepSet


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One event.

    Attributes:
        keep_set: what stayed.
        lengths: tokens that each request has had so far, dropped ones included, padding not.
    """

    keep_set: KeepSet
    lengths: Int[Tensor, " batch"]

    @classmethod
    def of(cls, keep_set: KeepSet, length: int) -> Snapshot:
        """Where all requests are equally long."""
        return cls(keep_set, torch.full((keep_set.counts.shape[1],), length))

    def kept(self) -> Bool[Tensor, "layers batch kv_heads positions"]:
        """True at every position that stayed; there are as many positions as the longest text has."""
        return self.keep_set.mask(int(self.lengths.max())).to(self.lengths.device)

    def exists(self) -> Bool[Tensor, "batch positions"]:
        """True at every position that a request has had."""
        return torch.arange(int(self.lengths.max()), device=self.lengths.device) < self.lengths[:, None]
