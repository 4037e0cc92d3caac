"""Mean and covariance of rows that come in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NAMES = ("count", "mean", "scatter")
_PART = 1024
"""Rows in one product on a GPU."""


class Moments:
    """Mean and covariance of rows, merged over chunks (Chan, Golub and LeVeque 1983).

        mean = m1 + (m2 - m1) n2 / n     scatter = s1 + s2 + (m2 - m1)(m2 - m1)' n1 n2 / n     covariance = scatter / n

    A covariance matrix is symmetric, so only its upper triangle is stored.

    Attributes:
        mean: zero where no row was counted.
    """

    _full: bool

    def __init__(self) -> None:
        self._count: Tensor | None = None
        self.mean: Float[Tensor, "batch heads dim"]
        self._scatter: Float[Tensor, "batch heads _"]

    def add(self, rows: Float[Tensor, "batch heads n dim"], counted: Bool[Tensor, "batch n"], full: bool) -> None:
        """Add those rows of a chunk that count; memory does not grow. `full` is the same in every call."""
        weights = counted[:, None, :, None].to(rows.dtype)
        count = weights.sum(2)
        mean = (weights.transpose(-1, -2) @ rows)[:, :, 0] / count.clamp(min=1)
        centred = (rows - mean[:, :, None]).mul_(weights)
        scatter = _upper(_products(centred)) if full else centred.square().sum(2)
        if self._count is not None:
            total = count + self._count
            shift = mean - self.mean
            spread = _upper(shift[..., :, None] * shift[..., None, :]) if full else shift.square()
            scatter = self._scatter + scatter + spread * (count * self._count / total.clamp(min=1))
            mean = self.mean + shift * count / total.clamp(min=1)
            count = total
        self._count, self.mean, self._scatter, self._full = count, mean, scatter, full

    def merged_with(self, others: Sequence[Moments]) -> Moments:
        """Return the moments of this batch followed by those of other batches."""
        every = [moments.tensors for moments in (self, *others)]
        return Moments.of({name: torch.cat([part[name] for part in every]) for name in NAMES}, self._full)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], full: bool) -> Moments:
        """Return the moments whose `tensors` these are."""
        moments = cls()
        moments._count, moments.mean, moments._scatter = (tensors[name] for name in NAMES)
        moments._full = full
        return moments

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return dict(zip(NAMES, (self._counted, self.mean, self._scatter), strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def reordered(self, rows: Int[Tensor, " rows"]) -> Moments:
        """Return the moments of these requests of the batch."""
        return Moments.of({name: part[rows.to(part.device)] for name, part in self.tensors.items()}, self._full)

    @property
    def covariance(self) -> Float[Tensor, "batch heads *dims"]:
        """The population covariance (divided by the count): a matrix `[dim, dim]` for each head, or its diagonal."""
        covariance, size = self._scatter / self._counted.clamp(min=1), self.mean.shape[-1]
        if not self._full:
            return covariance
        above, beside = torch.triu_indices(size, size, device=covariance.device)
        full = covariance.new_empty(*covariance.shape[:-1], size, size)
        full[..., above, beside] = full[..., beside, above] = covariance
        return full

    @property
    def _counted(self) -> Tensor:
        assert self._count is not None
        return self._count


def _products(rows: Float[Tensor, "batch heads n dim"]) -> Float[Tensor, "batch heads dim dim"]:
    """Return the sum over rows of each row's outer product with itself.

    A head's product has few numbers, so it would use few processors of a GPU. There, products of parts of the rows are
    computed and summed.
    """
    if rows.device.type == "cpu" or rows.shape[2] < 2 * _PART:
        return rows.transpose(-1, -2) @ rows
    whole = rows.shape[2] // _PART * _PART
    parts, rest = rows[:, :, :whole].unflatten(2, (-1, _PART)), rows[:, :, whole:]
    return (parts.transpose(-1, -2) @ parts).sum(2) + rest.transpose(-1, -2) @ rest


def _upper(matrix: Float[Tensor, "*rows dim dim"]) -> Float[Tensor, "*rows _"]:
    """Return the upper triangle of each matrix as a row."""
    above, beside = torch.triu_indices(matrix.shape[-1], matrix.shape[-1], device=matrix.device)
    return matrix[..., above, beside]
