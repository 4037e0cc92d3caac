"""Region wipe-out: stretches of the text of which nothing is left."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keepset.bench.analysis.snapshot import Snapshot
from keepset.errors import KeepsetError

REGION = 16


def wipeout_rate(snapshot: Snapshot, region: int = REGION) -> Float[Tensor, "layers batch kv_heads"]:
    """Share of the text's regions of which an event has kept nothing (Yang and Shen, AMS, appendix C).

    The paper gives the rate and no definition. Here regions are `region` tokens long, counted from the text's first
    token; a shorter one at the end counts as well. They are regions of the whole text so far: what an
    earlier event wiped out stays wiped out. The default is the shortest segment of the paper's Table 15.
    """
    if region < 1:
        raise KeepsetError(f"region={region} is not a number of tokens: use an integer from 1.")
    kept = snapshot.kept()
    missing = -kept.shape[-1] % region
    alive = F.pad(kept, (0, missing)).unflatten(-1, (-1, region)).any(-1).sum(-1)
    regions = (snapshot.lengths + region - 1) // region
    return 1 - alive / regions[:, None]
