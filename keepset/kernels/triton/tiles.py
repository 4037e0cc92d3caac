"""How much of its entries and queries a program looks at together: what a GPU has room for."""

from __future__ import annotations

import torch

_MOST = 64
"""Rows that make a product worth while."""
_LEAST = 16
"""Rows below which there is no product."""
_BYTES = 16 * 1024
"""Of one of the blocks that a program has under way, of which there are up to six: a program has 99 KiB."""


def rows_of(width: int, dtype: torch.dtype) -> int:
    """How many rows of so many numbers, a power of two as the rows are."""
    return max(_LEAST, min(_MOST, _BYTES // (width * dtype.itemsize)))
