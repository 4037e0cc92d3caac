"""How an entry is stored: keys and values in 8 or 4 bits, the matrix that mixes them, and the code of its score."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache, lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from jaxtyping import Float, Int8, Shaped, UInt8
from torch import Tensor

from keepset.kernels.dispatch import launched_on, upload, uses_triton

LARGEST = 127
"""The 8-bit integer for a row's largest magnitude."""
LEVELS = (0.1284, 0.3881, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326)
"""The positive half of the 16 levels with the least mean square error for a normal distribution (Max 1960)."""
_TWICE = {2: torch.int32, 4: torch.int64, 8: torch.complex128}
"""A dtype of twice as many bytes, by the bytes of a number."""
MIDDLE = 6.0
"""The distance from the end of the text at which codes hold log scores, in octaves: 64 tokens."""
SCORE_STEPS, SCORE_LIMIT = 512.0, 16.0
"""Steps per unit of a log score, and the largest log score."""
SLOPE_STEPS, SLOPE_LIMIT = 256.0, 2.0
"""Steps per unit of a slope, and the largest slope."""
_SLOPES = 2 * SLOPE_LIMIT * SLOPE_STEPS
"""How many slopes a code can hold: a code is `score step * _SLOPES + slope step`."""
SHORTEST = 1e-6
"""Shorter keys and values count as this long when the logarithm of their length is taken."""
_TINY = torch.finfo(torch.float32).tiny


class Mixing(NamedTuple):
    """An orthogonal matrix by which rows are mixed before they are rounded.

    Products of keys with queries stay as they are if both are mixed.

    Attributes:
        matrix: a key or value `x` is stored as `matrix @ x`.
    """

    matrix: Float[Tensor, "head_dim head_dim"]

    def mixed(self, rows: Float[Tensor, "*places head_dim"]) -> Float[Tensor, "*places head_dim"]:
        """Return mixed keys or values, ready to be rounded, in their own dtype.

        On a CPU sums are float64, so that a row's result does not depend on the other rows of the product. A difference
        in the last bit could make an engine and transformers round to different numbers.
        """
        return _times(rows, (self.matrix if uses_triton(rows.device) else _in_float64(self.matrix)).T)

    def mixed_queries(self, queries: Float[Tensor, "*places head_dim"]) -> Float[Tensor, "*places head_dim"]:
        """Return queries whose products with mixed keys equal those with the keys, in their own dtype."""
        return _times(queries, self.matrix.T)

    def unmixed(
        self, rows: Float[Tensor, "*places head_dim"], output: Float[Tensor, "*places head_dim"] | None = None
    ) -> Float[Tensor, "*places head_dim"]:
        """Return mixed rows, or sums of them, unmixed, in their own dtype.

        Args:
            rows: mixed rows.
            output: where the result goes, contiguous and apart from the rows; None for a new tensor.
        """
        return _times(rows, self.matrix, output)


@lru_cache(maxsize=16)
def _in_float64(matrix: Float[Tensor, "size size"]) -> Float[Tensor, "size size"]:
    """Return a matrix in float64; it is cached, because each layer mixes every new entry by it."""
    with torch.inference_mode(False):  # later calls may be outside of the caller's mode
        return matrix.double()


def _times(
    rows: Float[Tensor, "*places size"],
    matrix: Float[Tensor, "size size"],
    output: Float[Tensor, "*places size"] | None = None,
) -> Float[Tensor, "*places size"]:
    """Return each row times a matrix, in the row's dtype; sums have the matrix's. On a GPU this is one launch.

    Args:
        rows: with any strides.
        matrix: in the type of the sums.
        output: where the result goes; None for a new tensor.
    """
    if uses_triton(rows.device) and matrix.dtype == torch.float32:
        from keepset.kernels.triton import mixing  # loads Triton

        result = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) if output is None else output
        with launched_on(rows.device):
            mixing.times(rows, matrix, result)
        return result
    product = rows.to(matrix.dtype) @ matrix
    return product.to(rows.dtype) if output is None else output.copy_(product)


@cache
def mixing_of(size: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Mixing:
    """Return the mixing of rows of `size` numbers, which is the same in both runtimes.

    Args:
        size: numbers of a row.
        device: where rows are mixed.
        dtype: the dtype in which rows are mixed.
    """
    with torch.inference_mode(False):
        return Mixing(upload(mixing(size).to(dtype), torch.device(device)))


def mixing(size: int) -> Float[Tensor, "size size"]:
    """Return the orthogonal matrix that mixes rows of `size` numbers, in float64.

    Its columns have fixed random signs. For a power of two it is a Hadamard matrix. Other sizes are a power of two and
    an odd factor; the matrix is the Kronecker product of a Hadamard matrix and a discrete cosine transform of the odd
    size, so that every number is spread over the whole row.
    """
    power = size & -size
    odd = size // power
    at = torch.arange(odd, dtype=torch.float64)
    matrix = torch.cos(math.pi / odd * at[:, None] * (at + 0.5)) * math.sqrt(2 / odd)
    matrix[0] = math.sqrt(1 / odd)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) * math.sqrt(0.5)
    for _ in range(power.bit_length() - 1):
        matrix = torch.kron(step, matrix)
    digest = hashlib.shake_256(b"keepset").digest(size)
    return matrix * torch.tensor([1.0 if byte & 1 else -1.0 for byte in digest], dtype=torch.float64)


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
        """Return mixed rows from their stored form, in the scales' dtype.

        Args:
            rows: as they are stored.
            scale: of each row.
        """

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
        largest = torch.linalg.vector_norm(rows, torch.inf, -1, dtype=torch.promote_types(rows.dtype, torch.float32))
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


@cache
def levels_and_borders(device: torch.device) -> tuple[Float[Tensor, " 16"], Float[Tensor, " 15"]]:
    """Return all levels in rising order, and the borders between neighbours."""
    with torch.inference_mode(False):
        levels = upload(torch.tensor([*(-level for level in reversed(LEVELS)), *LEVELS], dtype=torch.float32), device)
        return levels, (levels[1:] + levels[:-1]) / 2


@cache
def _pairs(device: torch.device, dtype: torch.dtype) -> Shaped[Tensor, " 256"]:
    """Return for each byte the levels of its lower and upper half, viewed as one number of twice the size."""
    with torch.inference_mode(False):
        levels, byte = levels_and_borders(device)[0].to(dtype), torch.arange(256, device=device)
        return torch.stack([levels[byte & 15], levels[byte >> 4]], -1).view(_TWICE[dtype.itemsize])[:, 0]


def _mixing(rows: Float[Tensor, "*places dim"]) -> Mixing:
    """Return the mixing of such rows, in float32 or wider."""
    return mixing_of(rows.shape[-1], rows.device, torch.promote_types(rows.dtype, torch.float32))


FORMATS: Mapping[int, EntryFormat] = MappingProxyType({8: EightBits(), 4: FourBits()})
"""Every format by its bits."""


_BY_DTYPE = {torch.int8: FORMATS[8], torch.uint8: FORMATS[4]}


def format_of(dtype: torch.dtype) -> EntryFormat | None:
    """Return the format of rows in tensors of this dtype; None if they are not quantised."""
    return _BY_DTYPE.get(dtype)


def inputs_of(
    keys: Float[Tensor, "*entries head_dim"], values: Float[Tensor, "*entries value_dim"]
) -> Float[Tensor, "*entries inputs"]:
    """Return the networks' inputs: the key before rotation, the value, and the logarithms of their lengths.

    Args:
        keys: before rotation; a caller may also undo the rotation in the result.
        values: as cached.
    """
    inputs = torch.empty(
        *keys.shape[:-1], keys.shape[-1] + values.shape[-1] + 2, dtype=torch.float32, device=keys.device
    )
    key, value, lengths = inputs.split([keys.shape[-1], values.shape[-1], 2], -1)
    for part, source, length in zip((key, value), (keys, values), lengths.unbind(-1), strict=True):
        torch.linalg.vector_norm(part.copy_(source), dim=-1, out=length)
    lengths.clamp_(min=SHORTEST).log_()
    return inputs


def encode(outputs: Float[Tensor, "*entries 2"]) -> Float[Tensor, "*entries"]:
    """Return log scores and slopes as codes: integers from 1 on, exact in float32; NaN stays NaN.

    Holes, and entries without a code, have 0.
    """
    score, slope = outputs.float().unbind(-1)
    score, slope = _steps(score, SCORE_STEPS, SCORE_LIMIT), _steps(slope, SLOPE_STEPS, SLOPE_LIMIT)
    return score * _SLOPES + slope


def decode(codes: Float[Tensor, "*entries"]) -> tuple[Float[Tensor, "*entries"], Float[Tensor, "*entries"]]:
    """Return the log scores and the slopes that codes hold, to half a step; see `encode`."""
    score = (codes / _SLOPES).floor_()
    slope = torch.sub(codes, score, alpha=_SLOPES)
    return score.div_(SCORE_STEPS).sub_(SCORE_LIMIT), slope.div_(SLOPE_STEPS).sub_(SLOPE_LIMIT)


def _steps(numbers: Float[Tensor, "*shape"], steps: float, limit: float) -> Float[Tensor, "*shape"]:
    return (numbers * steps).add_(limit * steps + 0.5).floor_().clamp_(1, 2 * limit * steps - 1)
