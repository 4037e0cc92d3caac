"""Rows of numbers in 8 bits: whole numbers from -127 to 127, and one scale a row."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int8
from torch import Tensor

LARGEST = 127
"""The number that stands for a row's largest; -128 has no counterpart and is not used."""


def quantize(rows: Float[Tensor, "*places dim"]) -> tuple[Int8[Tensor, "*places dim"], Float[Tensor, "*places"]]:
    """The nearest whole multiples of each row's scale, which has the rows' own precision.

    What `dequantize` gives is mapped to itself again, but for a scale's last bit. A row with NaN or infinity has such a
    scale, and all of it is NaN then.
    """
    largest = torch.linalg.vector_norm(rows, torch.inf, -1, dtype=torch.float32)
    scale = (largest / LARGEST).to(rows.dtype)
    steps = rows / scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]  # of nothing but zeros none
    return steps.round_().clamp_(-LARGEST, LARGEST).char(), scale


def dequantize(rows: Int8[Tensor, "*places dim"], scale: Float[Tensor, "*places"]) -> Float[Tensor, "*places dim"]:
    """The rows that these are, in the scales' precision."""
    return rows.to(scale.dtype).mul_(scale[..., None])
