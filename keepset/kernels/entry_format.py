"""`EntryFormat`: how keys and values are stored in 8 or in 4 bits, with a scale for each row."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch
from jaxtyping import Float, Int8, Shaped, UInt8
from torch import Tensor

from keepset.kernels.dispatch import upload
from keepset.kernels.mixing import Mixing, mixing_of


class EntryFormat(ABC):
    """A format in which the rows of a store are written and read. A row is one key or one value.

    A format may mix a row's numbers by an orthogonal matrix before it rounds them. Attention then mixes queries in the
    same way, so that their products with keys do not change, and unmixes its output once.

    Attributes:
        bits: of each stored number.
        refined: whether new entries get a residual: their rounding error, stored in the same format.
    """

    bits: int
    refined: bool

    @abstractmethod
    def size(self, width: int) -> int:
        """Return how many numbers a row of `width` bytes has."""

    @abstractmethod
    def quantize(
        self, rows: Float[Tensor, "*places dim"], dtype: torch.dtype
    ) -> tuple[Shaped[Tensor, "*places width"], Float[Tensor, "*places"]]:
        """Return the stored form of mixed rows, and each row's scale; NaN for a row with NaN or infinity.

        Args:
            rows: keys or values, mixed.
            dtype: the dtype of the scales.
        """

    @abstractmethod
    def dequantize(
        self, rows: Shaped[Tensor, "*places width"], scale: Float[Tensor, "*places"]
    ) -> Float[Tensor, "*places dim"]:
        """Return mixed rows from their stored form, in the scales' dtype."""

    def mix(self, rows: Float[Tensor, "*places dim"]) -> Float[Tensor, "*places dim"]:
        """Return rows, or queries, with their numbers mixed."""
        return _mixing(rows).mixed(rows)

    def unmix(self, rows: Float[Tensor, "*places dim"]) -> Float[Tensor, "*places dim"]:
        """Return rows before `mix`."""
        return _mixing(rows).unmixed(rows)

    def rounded(self, rows: Float[Tensor, "*places dim"]) -> Float[Tensor, "*places dim"]:
        """Return rows as they are read after they were stored."""
        return self.unmix(self.dequantize(*self.quantize(self.mix(rows), rows.dtype)))


class EightBits(EntryFormat):
    """8-bit multiples of a scale, which is a 127th of the mixed row's largest magnitude.

    scale = max(|row|) / 127     integers = round(row / scale)

    Quantising dequantised rows gives the same integers, and the same scale up to its last bit. -128 has no positive
    counterpart and is not used.
    """

    bits, refined = 8, False

    def size(self, width: int) -> int:
        return width

    def quantize(
        self, rows: Float[Tensor, "*places dim"], dtype: torch.dtype
    ) -> tuple[Int8[Tensor, "*places dim"], Float[Tensor, "*places"]]:
        largest = torch.linalg.vector_norm(rows, torch.inf, -1, dtype=torch.float32)
        scale = (largest / LARGEST).to(dtype)
        steps = rows / scale.float().clamp(min=_TINY)[..., None]  # a row of zeros has the scale 0
        return steps.round_().clamp_(-LARGEST, LARGEST).char(), scale

    def dequantize(
        self, rows: Int8[Tensor, "*places dim"], scale: Float[Tensor, "*places"]
    ) -> Float[Tensor, "*places dim"]:
        return rows.to(scale.dtype).mul_(scale[..., None])


class FourBits(EntryFormat):
    """4-bit levels for a normal distribution, which the numbers of mixed rows approximately follow.

        scale = <row, levels> / <levels, levels>, where each level is the nearest to row / sqrt(mean(row^2))

    The scale is the least-squares one. Two neighbouring numbers share a byte, the first in its lower half. This is the
    quantiser of TurboQuant (Zandieh et al. 2025, arXiv:2504.19874), with the matrix of `mixing`, not a random one.
    """

    bits, refined = 4, True

    def size(self, width: int) -> int:
        return 2 * width

    def quantize(
        self, rows: Float[Tensor, "*places dim"], dtype: torch.dtype
    ) -> tuple[UInt8[Tensor, "*places half"], Float[Tensor, "*places"]]:
        wide = rows.float().contiguous()
        spread = torch.linalg.vector_norm(wide, dim=-1) / math.sqrt(wide.shape[-1])
        levels, borders = levels_and_borders(wide.device)
        codes = torch.bucketize(wide / spread.clamp(min=_TINY)[..., None], borders, out_int32=True)
        nearest = levels[codes]
        scale = (wide * nearest).sum(-1) / nearest.square_().sum(-1)
        codes = codes.to(torch.uint8)
        return codes[..., 0::2] | codes[..., 1::2] << 4, scale.where(spread.isfinite(), math.nan).to(dtype)

    def dequantize(
        self, rows: UInt8[Tensor, "*places half"], scale: Float[Tensor, "*places"]
    ) -> Float[Tensor, "*places dim"]:
        # One lookup of a byte gives both of its numbers.
        pairs = _pairs(scale.device, scale.dtype).index_select(0, rows.int().flatten())
        return pairs.view(rows.shape).view(scale.dtype).mul_(scale[..., None])


LARGEST = 127
"""The 8-bit integer for a row's largest magnitude."""
_TINY = torch.finfo(torch.float32).tiny

FORMATS: Mapping[int, EntryFormat] = MappingProxyType({8: EightBits(), 4: FourBits()})
"""Every format by its bits."""
_BY_DTYPE = {torch.int8: FORMATS[8], torch.uint8: FORMATS[4]}


def format_of(dtype: torch.dtype) -> EntryFormat | None:
    """Return the format of rows in tensors of this dtype; None if they are not quantised."""
    return _BY_DTYPE.get(dtype)


LEVELS = (0.1284, 0.3881, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326)
"""The positive half of the 16 levels with the least mean square error for a normal distribution (Max 1960)."""


@cache
def levels_and_borders(device: torch.device) -> tuple[Float[Tensor, " 16"], Float[Tensor, " 15"]]:
    """Return all levels in rising order, and the borders between neighbours."""
    with torch.inference_mode(False):
        levels = upload(torch.tensor([*(-level for level in reversed(LEVELS)), *LEVELS]), device)
        return levels, (levels[1:] + levels[:-1]) / 2


@cache
def _pairs(device: torch.device, dtype: torch.dtype) -> Shaped[Tensor, " 256"]:
    """Return for each byte the levels of its lower and upper half, viewed as one number of twice the size."""
    with torch.inference_mode(False):
        levels, byte = levels_and_borders(device)[0].to(dtype), torch.arange(256, device=device)
        return torch.stack([levels[byte & 15], levels[byte >> 4]], -1).view(_TWICE[dtype.itemsize])[:, 0]


_TWICE = {2: torch.int32, 4: torch.int64, 8: torch.complex128}
"""A dtype of twice as many bytes, by the bytes of a number."""


def _mixing(rows: Float[Tensor, "*places dim"]) -> Mixing:
    """Return the mixing of such rows, in float32 or wider."""
    return mixing_of(rows.shape[-1], rows.device, torch.promote_types(rows.dtype, torch.float32))
