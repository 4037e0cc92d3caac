"""Bursts: neighbouring tokens that are dropped together."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepset.bench.analysis.snapshot import Snapshot


def gone(snapshot: Snapshot) -> Bool[Tensor, "layers batch kv_heads positions"]:
    """Positions of the text that this event or one before it has dropped."""
    return ~snapshot.kept() & snapshot.exists()[:, None]


def dropped(snapshot: Snapshot, earlier: Snapshot | None = None) -> Bool[Tensor, "layers batch kv_heads positions"]:
    """Positions that this event itself has dropped: one row of the map in Figure 2 (Yang and Shen, AMS).

    `earlier` is the event before it; None at the first, which had the whole text.
    """
    lost = gone(snapshot)
    if earlier is not None:
        lost[..., : int(earlier.lengths.max())] &= ~gone(earlier)
    return lost


def longest_run(flags: Bool[Tensor, "*rows positions"]) -> Int[Tensor, "*rows"]:
    """Length of the longest stretch of neighbours that are all true.

    Of `gone` it is the longest gap that a head has in its text.
    """
    count = torch.arange(1, flags.shape[-1] + 1, device=flags.device)
    last_false = count.expand_as(flags).masked_fill(flags, 0).cummax(-1).values
    runs = count - last_false
    return torch.cat([runs, runs.new_zeros(*flags.shape[:-1], 1)], -1).amax(-1)
