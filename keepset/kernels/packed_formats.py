"""Formats that store keys and values differently, or in several places: TurboQuant and NVFP4."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from keepset.kernels.mixing import Mixing
from keepset.kernels.page_format import Parts, RowFormat, largest_number

_FOUR_BIT_FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of floats with 4 bits (E2M1), by their three lower bits; the highest bit is the sign."""
SHARE_SCALE = 16
"""Numbers that share a scale in NVFP4."""
LEAST_SQUARE = 1e-16
"""The number that TurboQuant adds to the square of a length before it divides by the length."""
_LEAST_LENGTH = 1e-8
"""The number that TurboQuant adds to a key's length before it divides by the length."""
_LEAST_STEP = 1e-8
"""The least step of TurboQuant's values."""


class PackedFormat(RowFormat):
    """A format that stores keys and values differently."""

    @property
    @abstractmethod
    def key_bytes(self) -> int:
        """Bytes of a stored key, with its scales."""

    @property
    @abstractmethod
    def value_bytes(self) -> int:
        """Bytes of a stored value, with its scales. Bytes behind them are not read."""


@dataclass(frozen=True, eq=False)
class TurboQuantFormat(PackedFormat):
    """TurboQuant's keys and values, as vLLM stores them in one slot.

    A key is a 16-bit length times a direction. Each number of the rotated direction is stored as the index of a
    centroid. Keys of 8 bits are plain floats (E4M3). A value is integers times a step, plus the value's minimum; step
    and minimum are 16-bit floats behind the integers. Bits are packed from each byte's lowest one on.

    Attributes:
        head_dim: numbers of a key, and of a value.
        dtype: the dtype in which keys and values are read.
        key_bits: bits of a key's number: 8, 4 or 3.
        value_bits: bits of a value's number: 4 or 3.
        centroids: the numbers that a key's indices stand for, in rising order; empty if keys have 8 bits.
        rotation: the orthogonal matrix that undoes the rotation of directions; empty if keys have 8 bits.
        unit_length: whether stored directions are scaled to length one before they are used.
        has_fp16_exponents: whether 8-bit floats have the exponent of 16-bit ones (a bias of 15, not of 7).
    """

    head_dim: int
    dtype: torch.dtype
    key_bits: int
    value_bits: int
    centroids: Float[Tensor, " levels"]
    rotation: Float[Tensor, "head_dim head_dim"]
    unit_length: bool
    has_fp16_exponents: bool

    key_scale = value_scale = None

    @cached_property
    def key_mixing(self) -> Mixing | None:  # type: ignore[override]
        return None if self.key_bits == 8 else Mixing(self.rotation.T.contiguous(), self.rotation)

    @cached_property
    def _borders(self) -> Float[Tensor, " levels_minus_1"]:
        """The borders between neighbouring centroids: from a border on, the next centroid is nearer."""
        return (self.centroids[:-1] + self.centroids[1:]) / 2

    @property
    def key_bytes(self) -> int:
        return self.head_dim if self.key_bits == 8 else -(-self.head_dim * self.key_bits // 8) + 2

    @property
    def value_bytes(self) -> int:
        return -(-self.head_dim * self.value_bits // 8) + 4

    def key_parts(self, rows: UInt8[Tensor, "*places row"]) -> Parts:
        rows = rows[..., : self.key_bytes]
        if self.key_bits == 8:
            return self._floats(rows), None
        directions = self.centroids[unpacked(rows[..., :-2], self.key_bits, self.head_dim)]
        if self.unit_length:
            directions = directions * (directions.square().sum(-1, keepdim=True) + LEAST_SQUARE).rsqrt()
        return directions, _halves(rows[..., -2:])[..., 0]

    def value_parts(self, rows: UInt8[Tensor, "*places row"]) -> Parts:
        rows = rows[..., : self.value_bytes]
        step, least = _halves(rows[..., -4:]).split(1, -1)
        return unpacked(rows[..., :-4], self.value_bits, self.head_dim) * step + least, None

    def encode_keys(
        self, numbers: Float[Tensor, "n head_dim"], scale: Float[Tensor, "#n"] | None = None
    ) -> UInt8[Tensor, "n row"]:
        """Return keys as vLLM's own kernel stores them."""
        whole = numbers.float()
        if self.key_mixing is None:
            return self._float_bytes(whole)
        length = torch.linalg.vector_norm(whole, dim=-1, keepdim=True)
        directions = self.key_mixing.mixed(whole / (length + _LEAST_LENGTH)).nan_to_num_(0.0)
        # A number midway between two centroids gets the larger one.
        return torch.cat(
            [packed(torch.bucketize(directions, self._borders, right=True), self.key_bits), bytes_of(length)], -1
        )

    def encode_values(
        self, numbers: Float[Tensor, "n head_dim"], scale: Float[Tensor, "#n"] | None = None
    ) -> UInt8[Tensor, "n row"]:
        """Return values as vLLM's own kernel stores them."""
        whole, levels = numbers.float(), (1 << self.value_bits) - 1
        least, largest = whole.amin(-1, keepdim=True), whole.amax(-1, keepdim=True)
        step = ((largest - least) / levels).clamp(min=_LEAST_STEP)
        steps = ((whole - least) / step + 0.5).nan_to_num_(0.0).clamp_(0, levels).int()
        return torch.cat([packed(steps, self.value_bits), bytes_of(step), bytes_of(least)], -1)

    def _floats(self, rows: UInt8[Tensor, "*places head_dim"]) -> Float[Tensor, "*places head_dim"]:
        """Return the numbers that 8-bit floats stand for."""
        if self.has_fp16_exponents:  # their bits are those of a 16-bit float without its highest exponent bit
            bits = rows.int()
            return ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(torch.uint16).view(torch.float16).float()
        return rows.contiguous().view(torch.float8_e4m3fn).float()

    def _float_bytes(self, numbers: Float[Tensor, "n head_dim"]) -> UInt8[Tensor, "n head_dim"]:
        """Return numbers as 8-bit floats, limited to the largest of them."""
        if not self.has_fp16_exponents:
            largest = largest_number(torch.float8_e4m3fn)
            return numbers.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
        bits = numbers.half().view(torch.int16).int()
        size = bits & 0x7FFF
        return ((size + 0x3F + (size >> 7 & 1) >> 7).clamp(max=0x7F) | bits >> 8 & 0x80).to(torch.uint8)


@dataclass(frozen=True, eq=False)
class NVFP4Format(PackedFormat):
    """NVFP4: 4-bit floats, an 8-bit scale for every sixteen of them, and the layer's scale.

    Attributes:
        head_dim: numbers of a key, and of a value.
        dtype: the dtype in which keys and values are read.
        key_scale, value_scale: the layer's scales.
    """

    head_dim: int
    dtype: torch.dtype
    key_scale: Float[Tensor, ""]
    value_scale: Float[Tensor, ""]

    @property
    def number_bytes(self) -> int:
        """Bytes of the numbers of a key or a value; its scales follow them."""
        return self.head_dim // 2

    @property
    def key_bytes(self) -> int:
        return self.number_bytes + self.head_dim // SHARE_SCALE

    @property
    def value_bytes(self) -> int:
        return self.key_bytes

    def key_parts(self, rows: UInt8[Tensor, "*places row"]) -> Parts:
        magnitudes = torch.tensor(_FOUR_BIT_FLOATS, device=rows.device)
        levels = torch.cat([magnitudes, -magnitudes])[unpacked(rows[..., : self.number_bytes], 4, self.head_dim)]
        scales = rows[..., self.number_bytes : self.key_bytes].contiguous().view(torch.float8_e4m3fn).float()
        return levels * scales.repeat_interleave(SHARE_SCALE, -1), None

    def encode_keys(
        self, numbers: Float[Tensor, "n head_dim"], scale: Float[Tensor, "#n"] | None = None
    ) -> UInt8[Tensor, "n row"]:
        return self._rows(numbers, self.key_scale[None] if scale is None else scale)

    def encode_values(
        self, numbers: Float[Tensor, "n head_dim"], scale: Float[Tensor, "#n"] | None = None
    ) -> UInt8[Tensor, "n row"]:
        return self._rows(numbers, self.value_scale[None] if scale is None else scale)

    def _rows(self, numbers: Float[Tensor, "n head_dim"], scale: Float[Tensor, "#n"]) -> UInt8[Tensor, "n row"]:
        """Return stored rows; the largest of sixteen numbers is stored as 6, others as the nearest 4-bit float."""
        whole, most = numbers.float() / scale[:, None], _FOUR_BIT_FLOATS[-1]
        some, largest = whole.unflatten(-1, (-1, SHARE_SCALE)), largest_number(torch.float8_e4m3fn)
        scales = (some.abs().amax(-1) / most).clamp(max=largest).where(some.isfinite().all(-1), float("nan"))
        scales = scales.to(torch.float8_e4m3fn)
        steps = (some / scales.float()[..., None]).nan_to_num_(0.0).flatten(-2)
        levels = torch.tensor(_FOUR_BIT_FLOATS, device=numbers.device)
        borders = (levels[:-1] + levels[1:]) / 2
        # Ties go to the float whose lowest bit is 0, so every other border belongs to the float above it.
        borders[1::2] = borders[1::2].nextafter(borders.new_zeros(()))
        codes = torch.bucketize(steps.abs(), borders) | steps.signbit().long() << 3
        return torch.cat([packed(codes, 4), scales.view(torch.uint8)], -1)


def unpacked(rows: UInt8[Tensor, "*places row"], bits: int, numbers: int) -> Int[Tensor, "*places numbers"]:
    """Return integers that are packed one behind the other, from each byte's lowest bit on.

    Args:
        rows: the bytes.
        bits: bits of a number, at most 8.
        numbers: numbers of a row.
    """
    first = torch.arange(numbers, device=rows.device) * bits
    byte, shift = first // 8, first % 8
    following = rows[..., (byte + 1).clamp(max=rows.shape[-1] - 1)].int()  # not used behind the last byte
    return (rows[..., byte].int() | following << 8) >> shift & (1 << bits) - 1


def packed(numbers: Int[Tensor, "*places numbers"], bits: int) -> UInt8[Tensor, "*places row"]:
    """Return integers packed into bytes; every eight of them fill whole bytes.

    Args:
        numbers: the numbers.
        bits: bits of a number, at most 8.
    """
    eight = numbers.long().unflatten(-1, (-1, 8))
    joined = (eight << bits * torch.arange(8, device=numbers.device)).sum(-1, keepdim=True)
    return (joined >> 8 * torch.arange(bits, device=numbers.device) & 0xFF).to(torch.uint8).flatten(-2)


def bytes_of(numbers: Float[Tensor, "*places some"]) -> UInt8[Tensor, "*places twice"]:
    """Return the bytes of 16-bit floats."""
    return numbers.half().view(torch.uint8)


def _halves(rows: UInt8[Tensor, "*places row"]) -> Float[Tensor, "*places half_row"]:
    """Return 16-bit floats in float32."""
    return rows.contiguous().view(torch.float16).float()
