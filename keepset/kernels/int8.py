"""Rows in 8 bits: integers from -127 to 127, and one scale for each row."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int8
from torch import Tensor

LARGEST = 127
"""The integer for a row's largest magnitude; -128 has no counterpart and is not used."""


def quantize(rows: Float[Tensor, "*places dim"]) -> tuple[Int8[Tensor, "*places dim"], Float[Tensor, "*places"]]:
    """Return rows as 8-bit integers, and each row's scale.

        scale = max(|row|) / 127     integers = round(row / scale)

    The output of `dequantize` is mapped to itself, up to the last bit of the scale. A row with NaN or infinity gets
    such a scale, and is NaN as a whole when it is read.

    Returns:
        The integers, and the scales in the rows' dtype.
    """
    largest = torch.linalg.vector_norm(rows, torch.inf, -1, dtype=torch.float32)
    scale = (largest / LARGEST).to(rows.dtype)
    steps = rows / scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]  # of nothing but zeros none
    return steps.round_().clamp_(-LARGEST, LARGEST).char(), scale


def dequantize(rows: Int8[Tensor, "*places dim"], scale: Float[Tensor, "*places"]) -> Float[Tensor, "*places dim"]:
    """Return `rows * scale` in the scales' dtype.

    Args:
        rows: 8-bit integers.
        scale: of each row.
    """
    return rows.to(scale.dtype).mul_(scale[..., None])
