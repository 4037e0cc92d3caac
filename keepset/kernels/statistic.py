"""What is taken of a column of attention: how much an entry received of each query becomes one number."""

from __future__ import annotations

from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor


class ColumnStatistic(StrEnum):
    """A statistic of the attention that entries receive; of no queries every one is zero."""

    SUM = "sum"
    MAX = "max"
    SQUARE = "square"
    """The sum of squares."""

    def over_queries(self, attention: Float[Tensor, "*heads queries entries"]) -> Float[Tensor, "*heads entries"]:
        """The statistic of these queries."""
        if self is ColumnStatistic.MAX:
            return attention.amax(-2)
        return (attention.square() if self is ColumnStatistic.SQUARE else attention).sum(-2)

    def merge(self, some: Float[Tensor, "*shape"], others: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The statistic of all queries from that of some and that of the others."""
        return torch.maximum(some, others) if self is ColumnStatistic.MAX else torch.add(some, others)
