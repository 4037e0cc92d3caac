"""Diagnostics of KeepSets: wiped-out regions, gaps, the middle, stability; and how much a text repeats itself."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

REGION = 16
"""Tokens of a region: the shortest segment of AMS's Table 15."""


Kept = Bool[Tensor, "layers kv_heads positions"]
"""Whether each position of one request's text so far is kept after an event."""


def wipeout_rate(kept: Kept, region: int = REGION) -> Float[Tensor, "layers kv_heads"]:
    """Return the share of the text's regions from which an event has kept nothing (Yang and Shen, AMS, appendix C).

    The paper gives the rate without a definition. In keepset, regions of `region` tokens are counted from the first
    token of the text so far, so a region that an earlier event wiped out stays wiped out. A shorter last region counts.
    """
    regions = F.pad(kept, (0, -kept.shape[-1] % region)).unflatten(-1, (-1, region))
    return 1 - regions.any(-1).sum(-1) / regions.shape[-2]


def middle_retention(kept: Kept) -> Float[Tensor, "layers kv_heads"]:
    """Return the share of the middle third of the text so far that is kept (Yang and Shen, AMS, Figure 4a).

    The paper does not say where the middle begins. In keepset, a third of the positions, rounded down, is left out at
    either end.
    """
    edge = kept.shape[-1] // 3
    middle = kept[..., edge : kept.shape[-1] - edge]
    return middle.sum(-1) / middle.shape[-1]


def longest_run(flags: Bool[Tensor, "*rows positions"]) -> Int[Tensor, "*rows"]:
    """Return the length of the longest stretch of neighbours that are all true."""
    count = torch.arange(1, flags.shape[-1] + 1, device=flags.device)
    last_false = count.expand_as(flags).masked_fill(flags, 0).cummax(-1).values
    runs = count - last_false
    return torch.cat([runs, runs.new_zeros(*flags.shape[:-1], 1)], -1).amax(-1)


def proxy_segments(kept: Kept) -> tuple[Float[Tensor, "layers kv_heads"], Float[Tensor, "layers kv_heads"]]:
    """Return the number of runs of consecutive kept tokens, and their mean length in tokens.

    They replace segments if a method has none (Yang and Shen, AMS, Figure 5: "consecutive retained tokens are grouped
    as proxy segments").
    """
    begins = kept & ~F.pad(kept, (1, 0))[..., :-1]
    runs = begins.sum(-1)
    return runs.float(), kept.sum(-1) / runs.clamp(min=1)


def by_depth(values: Float[Tensor, " layers *rest"]) -> dict[str, float]:
    """Return means over the early, middle and late layers (AMS, Table 14).

    The paper cuts its 28 layers into 8, 12 and 8 and gives no rule. In keepset, early and late are two sevenths of the
    layers each, rounded, and the middle is the rest. Stages without layers are left out.
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
