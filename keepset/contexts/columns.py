"""The columns of a layer's entries, as a store holds them and as a file has them, packed head after head."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Int
from torch import Tensor

from keepset.kernels.packed import SCALES, PackedHeads, runs_of

STORED = (*SCALES, *SCALES.values())
"""The columns in which keys and values are stored."""
RESIDUAL = "residual."
"""The prefix of the names of a residual's columns, if they are together with the others."""


def split_residual(columns: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the columns of the entries, and those of their residual by names without the prefix."""
    residual = {name.removeprefix(RESIDUAL): column for name, column in columns.items() if name.startswith(RESIDUAL)}
    return {name: column for name, column in columns.items() if not name.startswith(RESIDUAL)}, residual


def dequantized(columns: Mapping[str, Tensor], counts: Int[Tensor, "batch kv_heads"]) -> dict[str, Tensor]:
    """Return columns without free places, with keys and values as the model made them.

    Args:
        columns: `[entries, ...]` each, perhaps in few bits and with a residual.
        counts: number of entries of each head.
    """
    entry_columns, errors = split_residual(columns)
    residual = PackedHeads.of(errors, runs_of(errors["counts"].flatten().tolist()), None) if errors else None
    whole = PackedHeads.of(entry_columns, runs_of(counts.flatten().tolist()), residual).whole()
    left = {name: column for name, column in entry_columns.items() if name not in STORED}
    return {**left, "keys": whole.keys, "values": whole.values}
