"""Formats of caches whose entries are only moved: TurboQuant's and NVFP4. Keys and values are read, never written."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from keepset.kernels.page_format import RowFormat, row_blocks

_FOUR_BIT_FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of floats with 4 bits (E2M1), by their three lower bits; the highest bit is the sign."""
_SHARE_SCALE = 16
"""Numbers that share a scale in NVFP4."""
_LEAST_SQUARE = 1e-16
"""What TurboQuant adds to the square of a length before it divides by the length."""


@dataclass(frozen=True, eq=False)
class PackedFormat(RowFormat):
    """How a cache is read in which a key is stored otherwise than a value.

    Attributes:
        head_dim: numbers of a key, and of a value.
        dtype: the type that keys and values are read as.
    """

    head_dim: int
    dtype: torch.dtype

    @property
    @abstractmethod
    def key_bytes(self) -> int:
        """Bytes of a stored key, with its scales."""

    @property
    @abstractmethod
    def value_bytes(self) -> int:
        """Bytes of a stored value, with its scales."""

    @abstractmethod
    def keys(self, rows: UInt8[Tensor, "n key_bytes"]) -> Float[Tensor, "n head_dim"]:
        """Return what stored keys stand for, in float32."""

    @abstractmethod
    def values(self, rows: UInt8[Tensor, "n value_bytes"]) -> Float[Tensor, "n head_dim"]:
        """Return what stored values stand for, in float32."""

    def decode_keys(self, rows: UInt8[Tensor, "*places key_bytes"]) -> Float[Tensor, "*places head_dim"]:
        return self._decoded(rows, values=False)

    def decode_values(self, rows: UInt8[Tensor, "*places value_bytes"]) -> Float[Tensor, "*places head_dim"]:
        return self._decoded(rows, values=True)

    def _decoded(self, rows: UInt8[Tensor, "*places row"], values: bool) -> Float[Tensor, "*places head_dim"]:
        """Return what rows stand for, in `dtype`. They are read in blocks, so that little is held in float32.

        Args:
            rows: as they are stored; what lies behind a row's own bytes is not looked at.
            values: whether these are values.
        """
        width, read = (self.value_bytes, self.values) if values else (self.key_bytes, self.keys)
        flat = rows.reshape(-1, rows.shape[-1])[:, :width]
        decoded = torch.empty(len(flat), self.head_dim, dtype=self.dtype, device=rows.device)
        for some in row_blocks(len(flat), self.head_dim, rows.device):
            decoded[some] = read(flat[some])
        return decoded.view(*rows.shape[:-1], self.head_dim)


@dataclass(frozen=True, eq=False)
class TurboQuantFormat(PackedFormat):
    """TurboQuant's keys and values, as vLLM stores them in one slot.

    A key is a length, in 16 bits, times a direction. Each number of the rotated direction is the index of a centroid.
    Keys of 8 bits are floats (E4M3) and nothing else. A value is whole numbers times a step, plus its least number;
    both are 16-bit floats behind the numbers. Bits are packed from each byte's lowest one on.

    Attributes:
        key_bits: bits of a key's number: 8, 4 or 3.
        value_bits: bits of a value's number: 4 or 3.
        centroids: what a key's numbers stand for; empty if they have 8 bits.
        rotation: takes rotated directions back; empty if keys have 8 bits.
        unit_length: whether stored directions are scaled to length one before they are used.
        has_fp16_exponents: whether 8-bit floats have the exponent of 16-bit ones (a bias of 15, not of 7).
    """

    key_bits: int
    value_bits: int
    centroids: Float[Tensor, " levels"]
    rotation: Float[Tensor, "head_dim head_dim"]
    unit_length: bool
    has_fp16_exponents: bool

    @property
    def key_bytes(self) -> int:
        return self.head_dim if self.key_bits == 8 else -(-self.head_dim * self.key_bits // 8) + 2

    @property
    def value_bytes(self) -> int:
        return -(-self.head_dim * self.value_bits // 8) + 4

    def keys(self, rows: UInt8[Tensor, "n key_bytes"]) -> Float[Tensor, "n head_dim"]:
        if self.key_bits == 8:
            if self.has_fp16_exponents:  # their bits are those of a 16-bit float without its highest exponent bit
                bits = rows.int()
                return ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(torch.uint16).view(torch.float16).float()
            return rows.contiguous().view(torch.float8_e4m3fn).float()
        directions = self.centroids[unpacked(rows[:, :-2], self.key_bits, self.head_dim)]
        if self.unit_length:
            directions = directions * (directions.square().sum(-1, keepdim=True) + _LEAST_SQUARE).rsqrt()
        return _halves(rows[:, -2:]) * (directions @ self.rotation)

    def values(self, rows: UInt8[Tensor, "n value_bytes"]) -> Float[Tensor, "n head_dim"]:
        step, least = _halves(rows[:, -4:]).split(1, -1)
        return unpacked(rows[:, :-4], self.value_bits, self.head_dim) * step + least


@dataclass(frozen=True, eq=False)
class NVFP4Format(PackedFormat):
    """NVFP4: floats of 4 bits, a scale in 8 bits for every sixteen of them, and the layer's scale.

    Attributes:
        key_scale, value_scale: the layer's scales.
    """

    key_scale: Float[Tensor, ""]
    value_scale: Float[Tensor, ""]

    @property
    def number_bytes(self) -> int:
        """Bytes of the numbers of a key or a value, which its scales follow."""
        return self.head_dim // 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a key or a value."""
        return self.head_dim // _SHARE_SCALE

    @property
    def key_bytes(self) -> int:
        return self.number_bytes + self.scale_bytes

    @property
    def value_bytes(self) -> int:
        return self.key_bytes

    def keys(self, rows: UInt8[Tensor, "n key_bytes"]) -> Float[Tensor, "n head_dim"]:
        return self._numbers(rows) * self.key_scale

    def values(self, rows: UInt8[Tensor, "n value_bytes"]) -> Float[Tensor, "n head_dim"]:
        return self._numbers(rows) * self.value_scale

    def _numbers(self, rows: UInt8[Tensor, "n row"]) -> Float[Tensor, "n head_dim"]:
        magnitudes = torch.tensor(_FOUR_BIT_FLOATS, device=rows.device)
        levels = torch.cat([magnitudes, -magnitudes])[unpacked(rows[:, : self.number_bytes], 4, self.head_dim)]
        scales = rows[:, self.number_bytes :].contiguous().view(torch.float8_e4m3fn).float()
        return levels * scales.repeat_interleave(_SHARE_SCALE, -1)


def unpacked(rows: UInt8[Tensor, "n row"], bits: int, numbers: int) -> Int[Tensor, "n numbers"]:
    """Return whole numbers that are packed one behind the other, from each byte's lowest bit on.

    Args:
        rows: the bytes.
        bits: bits of a number, at most 8.
        numbers: numbers of a row.
    """
    first = torch.arange(numbers, device=rows.device) * bits
    byte, shift = first // 8, first % 8
    following = rows[:, (byte + 1).clamp(max=rows.shape[1] - 1)].int()  # not looked at behind the last byte
    return (rows[:, byte].int() | following << 8) >> shift & (1 << bits) - 1


def _halves(rows: UInt8[Tensor, "n row"]) -> Float[Tensor, "n half_row"]:
    """Return 16-bit floats in float32."""
    return rows.contiguous().view(torch.float16).float()
