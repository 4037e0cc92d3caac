"""How to reduce the attention of the query heads that share a KV head."""

from __future__ import annotations

from enum import StrEnum

from jaxtyping import Float
from torch import Tensor


class GroupReduction(StrEnum):
    """How the attention of the query heads that share a KV head is reduced to an entry's numbers."""

    MEAN = "mean"
    """The mean over the query heads."""
    EACH = "each"
    """No reduction: one number for each query head."""
    LARGEST = "largest"
    """The attention that the largest logits of the query heads make, as if they were one head."""

    def shape(self, group: int) -> tuple[int, ...]:
        """Return the shape of one entry's numbers if `group` query heads share a KV head."""
        return (group,) if self is GroupReduction.EACH else ()

    def of(self, sums: Float[Tensor, "*heads members entries"]) -> Float[Tensor, "*heads entries *group"]:
        """Return each entry's numbers."""
        return sums.transpose(-1, -2) if self is GroupReduction.EACH else sums.mean(-2)
