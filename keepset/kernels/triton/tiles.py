"""How many entries and queries a program looks at together: what fits a GPU's shared memory."""

from __future__ import annotations

import torch

_MOST = 64
"""Rows that make a product efficient."""
_LEAST = 16
"""Rows that a product needs, at least."""
_BYTES = 16 * 1024
"""Bytes of one block. A program has up to six blocks under way and 99 KiB."""

LEAST_PART = 256
"""Entries of a part of a head, at least: a shorter one is not worth a program of its own."""
PROGRAMS_PER_PROCESSOR = 4
"""Programs that keep a processor busy."""


def rows_of(width: int, dtype: torch.dtype) -> int:
    """Return how many rows of `width` numbers a block has, a power of two."""
    return max(_LEAST, min(_MOST, _BYTES // (width * dtype.itemsize)))
