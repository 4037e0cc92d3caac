"""Rotary position embeddings (Su et al., RoFormer, arXiv:2104.09864, section 3.2): undone, and averaged ahead.

A rotation is a pair of a cosine and a sine per plane. Both runtimes rotate and undo by the same arithmetic. The model
defines the cosines and sines, and which numbers of a row form a plane.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.shapes import Rows

Planes = Float[Tensor, "*shape planes"]
"""Cosines, or sines, of every plane."""


def inverse(cos: Planes, sin: Planes) -> tuple[Planes, Planes]:
    """Return the cosines and sines of the rotation that undoes another one.

    Scaled rotations (YaRN) are not orthogonal; dividing by the squared scale inverts them too.

    Args:
        cos, sin: of the rotation.
    """
    squared_scale = cos.square() + sin.square()
    return cos / squared_scale, -sin / squared_scale


def positions_ahead(lengths: Int[Tensor, " batch"], future: int) -> Int[Tensor, "batch {future}"]:
    """Return the next positions of each request.

    Args:
        lengths: tokens of each request.
        future: how many positions.
    """
    return lengths[:, None] + torch.arange(future, device=lengths.device)


def mean_rotation(
    cos: Float[Tensor, "batch n planes"], sin: Float[Tensor, "batch n planes"]
) -> tuple[Float[Tensor, "batch 1 planes"], Float[Tensor, "batch 1 planes"]]:
    """Return cosines and sines of the mean rotation over positions: rotation is linear in both.

    Args:
        cos, sin: of the rotation at each position.
    """
    return cos.mean(1, keepdim=True), sin.mean(1, keepdim=True)


def matches_unrotated(queries: Tensor, unrotated: Tensor, dtype: torch.dtype) -> bool:
    """Return whether queries with their rotation undone equal the model's unrotated ones, as far as a type is exact.

    Args:
        queries: `[batch, heads, n, head_dim]`, rotated back.
        unrotated: what the model itself makes without rotation.
        dtype: the type of the model's products.
    """
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    scale = float(unrotated.nan_to_num(0.0, 0.0, 0.0).abs().max() + 1e-6)
    # A text whose numbers overflow says nothing about the model.
    return torch.allclose(queries.float(), unrotated, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


class RotaryTable:
    """The rotary embedding of a model that keeps a table of it.

    Args:
        table: cosines, then sines, of every position, `[positions, rotary_dim]`; scaled if the model scales them.
        halves: whether dimension i rotates with i + rotary_dim / 2 (as in Llama), or with its neighbour.
        first: the first dimension that rotates; `rotary_dim` of them do.
    """

    def __init__(self, table: Float[Tensor, "positions rotary_dim"], halves: bool, first: int = 0) -> None:
        self._table, self._halves, self._first = table, halves, first

    def undo(self, queries: Rows, positions: Int[Tensor, "batch n"]) -> Rows:
        """Return queries as they were before rotation, in float32.

        Args:
            queries: after rotation.
            positions: theirs; any for queries that do not exist.
        """
        cos, sin = self._table[positions][:, None].float().chunk(2, -1)
        return self._rotate(queries.float(), *inverse(cos, sin))

    def rotate_ahead(self, rows: Rows, lengths: Int[Tensor, " batch"], future: int) -> Rows:
        """Return rows under the mean rotation of the next `future` positions of each request.

        Args:
            rows: of each request.
            lengths: tokens of each request.
            future: how many positions.
        """
        cos, sin = mean_rotation(*self._at(positions_ahead(lengths, future)))
        return self._rotate(rows, cos[:, None], sin[:, None])

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines; beyond the table the angles of two positions are added."""
        last = self._table.shape[0] - 1
        cos, sin = self._table[positions.clamp(max=last)].float().chunk(2, -1)
        beyond = (positions - last).clamp(min=0)  # checking whether any is beyond would wait for a device
        more_cos, more_sin = self._table[beyond].float().chunk(2, -1)
        scale = self._table[0].float().chunk(2, -1)[0]  # the cosines of position 0
        return (cos * more_cos - sin * more_sin) / scale, (sin * more_cos + cos * more_sin) / scale

    def _rotate(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half, width = cos.shape[-1], rows.shape[-1]
        before, turned, after = rows.split([self._first, 2 * half, width - self._first - 2 * half], -1)
        if self._halves:
            a, b = turned.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([before, turned, after], -1) if turned.shape[-1] < width else turned
