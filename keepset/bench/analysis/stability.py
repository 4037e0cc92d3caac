"""Temporal stability: how much of what one event kept is still there after the next."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.bench.analysis.snapshot import Snapshot
from keepset.errors import KeepsetError


def retained_iou(earlier: Snapshot, later: Snapshot) -> Float[Tensor, "layers batch kv_heads"]:
    """Intersection over union of what two consecutive events kept (Yang and Shen, AMS, Table 14, Figure 5).

    The paper does not say over which positions. Here they are those that existed at the earlier event, so that
    tokens which came in between are no change. As nothing that was dropped comes back, this is the share of the
    earlier set that survived; 1 where that was empty. `KeepSet.iou` compares the whole sets.
    """
    if bool((later.lengths < earlier.lengths).any()):
        raise KeepsetError("The later event's text is shorter than the earlier one's: give them in their order.")
    before = earlier.kept()
    after = later.keep_set.mask(before.shape[-1]).to(before.device) & earlier.exists()[:, None]
    if before.shape != after.shape:
        raise KeepsetError("Only events with the same layers, requests and KV heads can be compared.")
    union = (before | after).sum(-1)
    return (before & after).sum(-1) / union.clamp(min=1) + (union == 0).float()


def by_depth(values: Float[Tensor, " layers *rest"]) -> dict[str, float]:
    """Means over the early, middle and late layers (Table 14).

    The paper cuts its 28 layers into 8, 12 and 8 and gives no rule. Here early and late are a third of the layers
    each, rounded, and the middle is the rest; stages without layers are left out.
    """
    third = round(values.shape[0] / 3)
    middle = values.shape[0] - 2 * third
    stages = zip(("early", "middle", "late"), torch.split(values, [third, middle, third]), strict=True)
    return {name: float(part.mean()) for name, part in stages if part.shape[0]}
