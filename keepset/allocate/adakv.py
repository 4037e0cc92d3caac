"""AdaKV: the heads of a layer share one budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.method import Allocator, parameter
from keepset.select import round_to_total, top_mask


@dataclass(frozen=True)
class AdaKV(Allocator):
    """Divides a layer's budget among its heads by where the best scores are (Feng et al. 2024, arXiv:2407.11550).

    Algorithm 1: the best entries of all heads together give each head's adaptive number; a share `floor`
    of every head's budget stays uniform (the safeguard, 0.2 in the authors' program). A layer keeps exactly
    heads x budget, and each request is divided by itself.
    """

    name: ClassVar[str] = "adakv"
    layout: ClassVar[str] = "head-ragged"
    paper: ClassVar[str] = "arXiv:2407.11550"

    floor: float = parameter(0.2, minimum=0.0, maximum=1.0)

    def choose(
        self, ranked: Float[Tensor, "batch kv_heads entries"], quotas: Int[Tensor, "batch kv_heads"]
    ) -> Bool[Tensor, "batch kv_heads entries"]:
        """The layer's total, divided among its heads."""
        total = quotas.sum(-1)
        # Entry after entry, all heads of each: equal scores are then shared, not taken by the last head.
        pool = ranked.transpose(1, 2)
        adaptive = top_mask(pool.flatten(1), total).view_as(pool).sum(1)
        shares = torch.lerp(adaptive.double(), quotas.double(), self.floor)
        return top_mask(ranked, round_to_total(shares, total))
