"""Middle retention: what is left of the middle of a text."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.bench.analysis.snapshot import Snapshot


def middle_retention(snapshot: Snapshot) -> Float[Tensor, "layers batch kv_heads"]:
    """Share of the middle third of the text so far that is kept (Yang and Shen, AMS, Figure 4a).

    The paper does not say where the middle begins. Here a third of the positions, rounded down, is left out at
    either end.
    """
    kept = snapshot.kept()
    edge = (snapshot.lengths // 3)[:, None]
    at = torch.arange(kept.shape[-1], device=kept.device)
    middle = (at >= edge) & (at < snapshot.lengths[:, None] - edge)
    return (kept & middle[:, None]).sum(-1) / middle.sum(-1)[:, None]
