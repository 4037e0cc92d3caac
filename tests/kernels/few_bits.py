"""Entries in 8 and 4 bits as plain numbers say them, number by number: no code is shared with what is tested."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

LEVELS = [0.1284, 0.3881, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326]
ALL = [-level for level in reversed(LEVELS)] + LEVELS


def matrix(size: int) -> Tensor:
    """The matrix that mixes a row, from formulas for each of its numbers."""
    power = max(p for p in (2**i for i in range(12)) if size % p == 0)
    odd = size // power
    signs = [1 if byte % 2 else -1 for byte in hashlib.shake_256(b"keepset").digest(size)]

    def number(row: int, column: int) -> float:
        (p, o), (q, u) = divmod(row, odd), divmod(column, odd)
        wave = math.sqrt((2 if o else 1) / odd) * math.cos(math.pi * o * (2 * u + 1) / (2 * odd))
        return signs[column] * (-1) ** (p & q).bit_count() / math.sqrt(power) * wave

    return torch.tensor([[number(row, column) for column in range(size)] for row in range(size)], dtype=torch.float64)


def in_steps(row: Tensor) -> Tensor:
    """What is read of a mixed row in 8 bits, in float64."""
    step = float(row.abs().max()) / 127 or 1.0
    return torch.tensor([round(x / step) * step for x in row.double().tolist()], dtype=torch.float64)


def rounded(row: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What is read of a mixed row in 4 bits, in float64."""
    numbers = row.double().tolist()
    if not all(map(math.isfinite, numbers)):
        return torch.full_like(row, math.nan, dtype=torch.float64)
    spread = math.sqrt(sum(x * x for x in numbers) / len(numbers)) or 1.0
    nearest = [min(ALL, key=lambda level: abs(level - x / spread)) for x in numbers]
    scale = sum(x * c for x, c in zip(numbers, nearest, strict=True)) / sum(c * c for c in nearest)
    return torch.tensor(nearest, dtype=torch.float64) * float(torch.tensor(scale).to(dtype))


def meant(stored: Tensor, scale: Tensor) -> Tensor:
    """What stored rows stand for, mixed, in float64."""
    numbers = [[ALL[half] for byte in row for half in (byte & 15, byte >> 4)] for row in stored.flatten(0, -2).tolist()]
    rows = torch.tensor(numbers, dtype=torch.float64).view(*stored.shape[:-1], 2 * stored.shape[-1])
    return rows * scale.double()[..., None]
