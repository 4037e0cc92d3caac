"""Quantised rows as plain numbers say them: what a row stands for, and how a key or value is stored, one by one."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from keepset.kernels.entry_format import Mixing
from keepset.kernels.page_format import PageFormat
from tests.kernels.few_bits import matrix

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""The types of numbers of 8 bits, by name."""


def format_of(kind: str, head_dim: int, dtype: torch.dtype, scales: tuple[float, float] | None = None) -> PageFormat:
    """A format; with the two scales of a layer, or with a scale for each row."""
    if kind == "int8":
        return PageFormat(torch.int8, head_dim, dtype, mixing=mixing_of(head_dim))
    factors = () if scales is None else (torch.tensor(scale) for scale in scales)
    return PageFormat(KINDS[kind], head_dim, dtype, *factors)


def mixing_of(head_dim: int) -> Mixing:
    """The matrix of rows in 8 bits, by its formula."""
    return Mixing(matrix(head_dim).float())


def number_of(byte: int, kind: str) -> float:
    """What a stored byte stands for, less its scale."""
    if kind == "int8":
        return float(byte - 256 if byte > 127 else byte)
    bits, bias = (3, 7) if kind == "fp8" else (2, 15)
    sign, exponent, mantissa = byte >> 7, (byte & 127) >> bits, byte & ((1 << bits) - 1)
    largest = (1 << (7 - bits)) - 1
    if kind == "fp8" and (exponent, mantissa) == (largest, 7):
        return math.nan
    if kind != "fp8" and exponent == largest:
        return math.nan if mantissa else math.copysign(math.inf, -sign)
    if exponent == 0:
        size = mantissa * 2.0 ** (1 - bias - bits)
    else:
        size = (1 + mantissa / (1 << bits)) * 2.0 ** (exponent - bias)
    return -size if sign else size


_NUMBERS = {kind: torch.tensor([number_of(byte, kind) for byte in range(256)]) for kind in KINDS}


def meant(rows: Tensor, kind: str, head_dim: int, scale: float | None = None) -> Tensor:
    """What rows stand for, in float64."""
    flat = rows.contiguous().view(torch.uint8).reshape(-1, rows.shape[-1])
    numbers = _NUMBERS[kind][flat[:, :head_dim].long()].double()
    if scale is None:
        row_scales = [struct.unpack("f", bytes(row))[0] for row in flat[:, head_dim:].tolist()]
        numbers *= torch.tensor(row_scales, dtype=torch.float64)[:, None]
    else:
        numbers *= float(torch.tensor(scale))  # which is a float32
    return (_unmixed(numbers) if kind == "int8" else numbers).view(*rows.shape[:-1], head_dim)


def _unmixed(rows: Tensor) -> Tensor:
    """What mixed rows stand for, number after number, so that a row means the same wherever it is."""
    unmix, read = mixing_of(rows.shape[1]).matrix.double(), torch.zeros_like(rows)
    for i, column in enumerate(rows.T):
        read += column[:, None] * unmix[i]
    return read


def random_rows(*shape: int, kind: str, head_dim: int, own_scales: bool, draw: torch.Generator) -> Tensor:
    """Rows of any finite numbers; scales are about one over the largest."""
    finite = _NUMBERS[kind].isfinite().nonzero()[:, 0]
    rows = finite[torch.randint(len(finite), (*shape, head_dim), generator=draw)].byte()
    if not own_scales:
        return rows
    scales = (torch.rand(*shape, 1, generator=draw) + 0.5) / _NUMBERS[kind][finite].abs().max()
    return torch.cat([rows, scales.view(torch.uint8)], -1)


ALL_FORMATS = [("int8", None), ("fp8", None), ("fp8", (0.01, 0.02)), ("fp8_e5m2", (1e-4, 5e-5))]
"""Kinds of numbers, and the scales of a layer's keys and values; None where each row has its own."""


def quantised(
    caches: list[Tensor], kind: str, scales: tuple[float, float] | None, dtype: torch.dtype, draw: torch.Generator
) -> tuple[list[Tensor], list[Tensor], PageFormat]:
    """Caches of random rows where others hold numbers, what they mean in the others' places, and their format.

    Where the others hold NaN, rows have all bits set, which is no number either if it is a float. The rows of a token
    follow one another, as in the others.
    """
    stored, floats, dim = [], [], caches[0].shape[3] // 2
    for cache in caches:
        blocks, heads, size, _ = cache.shape
        rows = random_rows(blocks, size, heads, 2, kind=kind, head_dim=dim, own_scales=scales is None, draw=draw)
        rows = rows.flatten(3).transpose(1, 2)
        nothing = cache[..., :1].isnan()
        parts = [meant(part, kind, dim, scales and scales[i]) for i, part in enumerate(rows.chunk(2, -1))]
        floats.append(torch.cat(parts, -1).to(dtype).masked_fill(nothing, math.nan))
        rows.masked_fill_(nothing, 255)
        stored.append(rows.view(torch.int8) if kind == "int8" else rows)
    return stored, floats, format_of(kind, dim, dtype, scales)
