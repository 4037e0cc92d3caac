"""What is added up of query heads that share a KV head."""

from __future__ import annotations

from enum import StrEnum

from jaxtyping import Float
from torch import Tensor


class GroupReduction(StrEnum):
    """What is added up of the query heads that share a KV head."""

    MEAN = "mean"
    """The mean of their attention."""
    EACH = "each"
    """Each head's own: as many numbers of an entry."""
    LARGEST = "largest"
    """The attention of one head, whose logits are the largest of theirs."""

    def shape(self, group: int) -> tuple[int, ...]:
        """Of an entry's numbers, where so many query heads share a KV head."""
        return (group,) if self is GroupReduction.EACH else ()

    def of(self, sums: Float[Tensor, "*heads members entries"]) -> Float[Tensor, "*heads entries *group"]:
        """Entries' numbers, of what they receive of every query head (`received_attention`)."""
        return sums.transpose(-1, -2) if self is GroupReduction.EACH else sums.mean(-2)
