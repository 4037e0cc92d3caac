"""Mean and covariance of rows that come in parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Moments:
    """Mean and covariance of rows, merged over chunks (Chan, Golub and LeVeque 1983).

    Attributes:
        mean: zero where nothing was counted.
    """

    def __init__(self) -> None:
        self._count: Tensor | None = None
        self.mean: Float[Tensor, "batch heads dim"]
        self._scatter: Tensor

    def add(self, rows: Float[Tensor, "batch heads n dim"], counted: Bool[Tensor, "batch n"], full: bool) -> None:
        """Takes in more rows; memory does not grow.

        Args:
            rows: of one chunk.
            counted: which of them count; padding does not.
            full: whether the covariance is a matrix or only its diagonal; the same in every call.
        """
        weights = counted[:, None, :, None].to(rows.dtype)
        count = weights.sum(2)
        mean = (rows * weights).sum(2) / count.clamp(min=1)
        centred = (rows - mean[:, :, None]) * weights
        scatter = centred.transpose(-1, -2) @ centred if full else centred.square().sum(2)
        if self._count is not None:
            total = count + self._count
            shift = mean - self.mean
            spread = shift[..., :, None] * shift[..., None, :] if full else shift.square()
            weight = count * self._count / total.clamp(min=1)
            scatter = self._scatter + scatter + spread * (weight[..., None] if full else weight)
            mean = self.mean + shift * count / total.clamp(min=1)
            count = total
        self._count, self.mean, self._scatter = count, mean, scatter

    def joined(self, others: Sequence[Moments]) -> Moments:
        """Those of this one's batch, and of others' after it."""
        every, joined = (self, *others), Moments()
        joined._count = torch.cat([moments._counted for moments in every])
        joined.mean = torch.cat([moments.mean for moments in every])
        joined._scatter = torch.cat([moments._scatter for moments in every])
        return joined

    @property
    def covariance(self) -> Float[Tensor, "batch heads *dims"]:
        """Divided by the count, as for a whole population; `[dim, dim]` of a request's head, or its diagonal."""
        count = self._counted.clamp(min=1)
        return self._scatter / count.view(*count.shape, *(1,) * (self._scatter.ndim - count.ndim))

    @property
    def _counted(self) -> Tensor:
        assert self._count is not None
        return self._count
