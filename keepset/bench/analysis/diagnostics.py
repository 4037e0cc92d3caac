"""Diagnostics of KeepSets: wiped-out regions, gaps, the middle, stability; and how much a text repeats itself."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.keep_set import KeepSet

REGION = 16
"""Tokens of a region: the shortest segment of AMS's Table 15."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One event: what stayed, and the tokens that each request has had so far `[batch]`, without padding."""

    keep_set: KeepSet
    lengths: Int[Tensor, " batch"]

    def kept(self) -> Bool[Tensor, "layers batch kv_heads positions"]:
        """Return whether each position stayed; there are as many positions as the longest text has tokens."""
        return self.keep_set.mask(int(self.lengths.max())).to(self.lengths.device)

    def exists(self) -> Bool[Tensor, "batch positions"]:
        """Return whether a request has had each position."""
        return torch.arange(int(self.lengths.max()), device=self.lengths.device) < self.lengths[:, None]


def wipeout_rate(snapshot: Snapshot, region: int = REGION) -> Float[Tensor, "layers batch kv_heads"]:
    """Return the share of the text's regions of which an event has kept nothing (Yang and Shen, AMS, appendix C).

    The paper gives the rate and no definition. Here regions of `region` tokens are counted from the first token of the
    whole text so far, so a region that an earlier event wiped out stays wiped out. A shorter region at the end counts.
    """
    kept = snapshot.kept()
    missing = -kept.shape[-1] % region
    alive = F.pad(kept, (0, missing)).unflatten(-1, (-1, region)).any(-1).sum(-1)
    regions = (snapshot.lengths + region - 1) // region
    return 1 - alive / regions[:, None]


def middle_retention(snapshot: Snapshot) -> Float[Tensor, "layers batch kv_heads"]:
    """Return the share of the middle third of the text so far that is kept (Yang and Shen, AMS, Figure 4a).

    The paper does not say where the middle begins. Here a third of the positions, rounded down, is left out at either
    end.
    """
    kept = snapshot.kept()
    edge = (snapshot.lengths // 3)[:, None]
    at = torch.arange(kept.shape[-1], device=kept.device)
    middle = (at >= edge) & (at < snapshot.lengths[:, None] - edge)
    return (kept & middle[:, None]).sum(-1) / middle.sum(-1)[:, None]


def gone(snapshot: Snapshot) -> Bool[Tensor, "layers batch kv_heads positions"]:
    """Return whether this event or one before it has dropped each position of the text."""
    return ~snapshot.kept() & snapshot.exists()[:, None]


def longest_run(flags: Bool[Tensor, "*rows positions"]) -> Int[Tensor, "*rows"]:
    """Return the length of the longest stretch of neighbours that are all true; of `gone` it is the longest gap."""
    count = torch.arange(1, flags.shape[-1] + 1, device=flags.device)
    last_false = count.expand_as(flags).masked_fill(flags, 0).cummax(-1).values
    runs = count - last_false
    return torch.cat([runs, runs.new_zeros(*flags.shape[:-1], 1)], -1).amax(-1)


def proxy_segments(
    snapshot: Snapshot,
) -> tuple[Float[Tensor, "layers batch kv_heads"], Float[Tensor, "layers batch kv_heads"]]:
    """Return the number of runs of neighbouring tokens that stayed, and their mean length in tokens.

    They stand for segments where a method has none (Yang and Shen, AMS, Figure 5: "consecutive retained tokens are
    grouped as proxy segments").
    """
    kept = snapshot.kept()
    begins = kept & ~F.pad(kept, (1, 0))[..., :-1]
    runs = begins.sum(-1)
    return runs.float(), kept.sum(-1) / runs.clamp(min=1)


def by_depth(values: Float[Tensor, " layers *rest"]) -> dict[str, float]:
    """Return means over the early, middle and late layers (AMS, Table 14).

    The paper cuts its 28 layers into 8, 12 and 8 and gives no rule. Here early and late are two sevenths of the layers
    each, rounded, and the middle is the rest. Stages without layers are left out.
    """
    edge = round(values.shape[0] * 2 / 7)
    stages = zip(
        ("early", "middle", "late"), torch.split(values, [edge, values.shape[0] - 2 * edge, edge]), strict=True
    )
    return {name: float(part.mean()) for name, part in stages if part.shape[0]}


def repetition_rate(ids: Int[Tensor, " tokens"], n: int = 4) -> float:
    """Return the share of a text's n-grams that have occurred in it before; 0 for a text shorter than n.

    Yang and Shen (AMS, Figure 4b, Table 9) give the rate without n or formula; 4 is usual for degenerate repetition.
    """
    if ids.shape[0] < n:
        return 0.0
    grams = ids.unfold(0, n, 1)
    return 1 - grams.unique(dim=0).shape[0] / grams.shape[0]
