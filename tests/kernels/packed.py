"""TurboQuant's and NVFP4's caches as plain numbers say them: where each byte lies, and what an entry's bytes mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepset.kernels.entry_parts import EntryParts, nvfp4_parts, slot_parts
from keepset.kernels.packed_formats import NVFP4Format, PackedFormat, TurboQuantFormat

Bytes = Callable[[Any, Any, Any], list[Any]]
"""Where the bytes of an entry are in memory, by block, head and offset: the key's, and behind them the value's.

Numbers, or tensors of them, of which it is asked entry by entry at once.
"""
KINDS = ("k8v4", "fp16 k8v4", "k4v4", "k3v4", "k3v3", "nvfp4", "nvfp4 by tokens", "nvfp4 swizzled")
"""TurboQuant by its bits, and NVFP4 by its layout. One has 8-bit floats with the exponents of 16-bit ones."""
SCALES = 0.5, 2.0
"""A layer's scales of keys and of values, in NVFP4."""


def of_slots(shape: tuple[int, int, int], key: int, value: int, by_heads: bool) -> tuple[Tensor, Bytes]:
    """Keys and values in one slot, with two bytes that fill it, and a cache with a gap behind each block.

    Args:
        shape: blocks, heads, and tokens of a block.
        key, value: their bytes.
    """
    blocks, heads, size = shape
    slot = key + value + 2
    page = heads * size * slot
    strides = (size * slot, slot) if by_heads else (slot, heads * slot)
    memory = torch.empty(blocks * (page + 6), dtype=torch.uint8)
    cache = memory.as_strided((blocks, heads, size, slot), (page + 6, *strides, 1))

    def where(block: Any, head: Any, offset: Any) -> list[Any]:
        first = block * (page + 6) + head * strides[0] + offset * strides[1]
        return [first + i for i in range(key + value)]

    return cache, where


def of_nvfp4(shape: tuple[int, int, int], head_dim: int, by_heads: bool, swizzled: bool) -> tuple[Tensor, Bytes]:
    """Four regions in each block: numbers and scales of keys, numbers and scales of values."""
    (blocks, heads, size), numbers, scales = shape, head_dim // 2, head_dim // 16
    row, rows = numbers + scales, heads * size
    memory = torch.empty(blocks * 2 * rows * row, dtype=torch.uint8)
    strides = (size * row, row) if by_heads else (row, 2 * heads * row)
    cache = memory.as_strided((blocks, 2 * heads, size, row), (2 * rows * row, *strides, 1))

    def where(block: Any, head: Any, offset: Any) -> list[Any]:
        found = []
        for side in (0, 1):
            region = (2 * block + side) * rows * row
            place = head * size + offset if by_heads else offset * heads + head
            found += [region + place * numbers + i for i in range(numbers)]
            region += rows * numbers
            for i in range(scales):
                if side and swizzled:
                    quarter = scales // 4
                    place = head * size + offset // 4 * 4 + i // quarter
                    found.append(region + place * scales + i % quarter * 4 + offset % 4)
                else:
                    found.append(region + place * scales + i)
        return found

    return cache, where


def memory_of(cache: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())


def format_of(kind: str, head_dim: int, dtype: torch.dtype) -> PackedFormat:
    """A format, with levels and a matrix that are anything."""
    if kind.startswith("nvfp4"):
        return NVFP4Format(head_dim, dtype, *(torch.tensor(scale) for scale in SCALES))
    bits, draw = [int(each) for each in kind[-4:] if each.isdigit()], torch.Generator().manual_seed(3)
    centroids = torch.randn(0 if bits[0] == 8 else 2 ** bits[0], generator=draw).sort().values
    rotation = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=draw)).Q
    return TurboQuantFormat(head_dim, dtype, bits[0], bits[1], centroids, rotation, bits[0] != 4, "fp16" in kind)


def cache_of(kind: str, how: PackedFormat, shape: tuple[int, int, int]) -> tuple[Tensor, Bytes, EntryParts]:
    """A cache of blocks, heads and tokens of a block; where its entries' bytes are, and as keepset views it."""
    if not kind.startswith("nvfp4"):
        cache, where = of_slots(shape, how.key_bytes, how.value_bytes, by_heads=kind == "k3v4")
        return cache, where, slot_parts(cache, how.key_bytes, how.value_bytes)
    swizzled = kind.endswith("swizzled")
    cache, where = of_nvfp4(shape, how.head_dim, not kind.endswith("tokens"), swizzled)
    return cache, where, nvfp4_parts(cache, swizzled)


def drawn_rows(kind: str, how: PackedFormat, number: int, draw: torch.Generator) -> Tensor:
    """The bytes of keys, and behind them of values, of numbers of about one."""
    rows = torch.randint(256, (number, how.key_bytes + how.value_bytes), generator=draw).byte()
    if isinstance(how, NVFP4Format):
        ends = how.key_bytes, how.key_bytes + how.value_bytes
        for end in ends:
            rows[:, end - how.head_dim // 16 : end] = rows[:, end - how.head_dim // 16 : end] % 24 + 16  # 1/32 to 1/4
        return rows
    halves = (torch.rand(number, 3, generator=draw) + 0.5) * torch.tensor([1.0, 0.1, -1.0])
    stored = halves.half().view(torch.uint8).view(number, 6)
    if how.key_bytes > how.head_dim // 2 + 2:  # floats of 8 bits, of which none is NaN and few are large
        rows[:, : how.key_bytes] &= 0xBF if "fp16" not in kind else 0xFF
    else:
        rows[:, how.key_bytes - 2 : how.key_bytes] = stored[:, :2]
    rows[:, -4:] = stored[:, 2:]
    return rows


def meant(rows: Tensor, how: PackedFormat) -> tuple[Tensor, Tensor]:
    """What bytes of keys and values mean, in float64."""
    keys, values = rows.split([how.key_bytes, how.value_bytes], -1)
    if isinstance(how, NVFP4Format):
        return _four_bit_floats(keys, how.head_dim, SCALES[0]), _four_bit_floats(values, how.head_dim, SCALES[1])
    assert isinstance(how, TurboQuantFormat)
    step, least = values[..., -4:].contiguous().view(torch.float16).double().split(1, -1)
    numbers = whole_numbers(values[..., :-4], how.value_bits) * step + least
    if how.key_bits == 8:
        return floats(15 if how.has_fp16_exponents else 7)[keys.long()], numbers
    chosen = how.centroids.double()[whole_numbers(keys[..., :-2], how.key_bits)]
    chosen /= chosen.norm(dim=-1, keepdim=True) if how.unit_length else 1.0
    return keys[..., -2:].contiguous().view(torch.float16).double() * (chosen @ how.rotation.double()), numbers


def whole_numbers(rows: Tensor, bits: int) -> Tensor:
    """Bits from each byte's lowest on, a number's lowest first."""
    stream = torch.stack([rows >> i & 1 for i in range(8)], -1).flatten(-2).unflatten(-1, (-1, bits))
    return (stream.long() * 2 ** torch.arange(bits)).sum(-1)


def floats(bias: int) -> Tensor:
    """What each byte is as a float with 4 bits of exponent and 3 of mantissa, and no infinity."""
    return torch.tensor([small_float(code, 3, 4, bias) for code in range(256)], dtype=torch.float64)


def small_float(code: int, mantissa: int, exponent: int, bias: int) -> float:
    """A float with so many bits of mantissa and exponent, which has no infinity."""
    sign, power, part = code >> mantissa + exponent, code >> mantissa & (1 << exponent) - 1, code & (1 << mantissa) - 1
    size = 2.0**-mantissa * (part + (2**mantissa if power else 0)) * 2.0 ** (max(power, 1) - bias)
    return -size if sign else size


def _four_bit_floats(rows: Tensor, head_dim: int, factor: float) -> Tensor:
    levels = torch.tensor([small_float(code, 1, 2, 1) for code in range(16)], dtype=torch.float64)
    numbers, scales = rows.split([head_dim // 2, head_dim // 16], -1)
    return levels[whole_numbers(numbers, 4)] * floats(7)[scales.long()].repeat_interleave(16, -1) * factor


@dataclass
class Packed:
    """Caches of layers where others hold numbers.

    Attributes:
        parts: as keepset views them.
        caches: what they mean, in the others' places and float64.
        format: of all of them.
        memory: all of each cache's bytes.
        where: where the bytes of an entry are.
    """

    parts: list[EntryParts]
    caches: list[Tensor]
    format: PackedFormat
    memory: list[Tensor]
    where: Bytes

    @classmethod
    def like(cls, caches: list[Tensor], kind: str, dtype: torch.dtype, draw: torch.Generator) -> Packed:
        """Random entries; where the others hold NaN all bits are set, which make no number or a large one."""
        blocks, heads, size, width = caches[0].shape
        how = format_of(kind, width // 2, dtype)
        parts, meanings, memories = [], [], []
        for cache in caches:
            stored, where, views = cache_of(kind, how, (blocks, heads, size))
            memory, rows = memory_of(stored), drawn_rows(kind, how, blocks * heads * size, draw)
            rows[cache[..., 0].isnan().flatten()] = 255
            memory[_all_places(where, blocks, heads, size)] = rows
            read = torch.cat(meant(rows, how), -1).view(blocks, heads, size, width)
            meanings.append(read.masked_fill(cache[..., :1].isnan(), float("nan")))
            parts.append(views)
            memories.append(memory)
        return cls(parts, meanings, how, memories, where)

    def rows(self) -> Tensor:
        """The bytes of all entries, `[layers, blocks, heads, size, bytes]`."""
        shape = self.caches[0].shape[:3]
        places = _all_places(self.where, *shape)
        return torch.stack([memory[places].view(*shape, -1) for memory in self.memory])


def _all_places(where: Bytes, blocks: int, heads: int, size: int) -> Tensor:
    return torch.stack(where(*torch.cartesian_prod(*map(torch.arange, (blocks, heads, size))).T), -1)
