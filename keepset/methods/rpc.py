"""RPC, reasoning path compression: what the newest queries of a reasoning path look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F

from keepset.core.feature import Needs
from keepset.core.features.window import WindowAttention
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores


@dataclass(frozen=True)
class RPC(Method):
    """Keeps what a window of recent queries attends to (Song et al. 2025, arXiv:2505.13866).

    Attention of the `window` newest queries is averaged over them and over query heads, and average-pooled with
    `kernel`. As in the AMS paper's comparison (table 11), and its authors' program, the heads are those that share a
    KV head, and the first four tokens and the window always stay. With `aggregation="all"` they are all heads of the
    layer, as in RPC's own formula and program, whose names for both these are; where heads hold different entries, as
    inside `adakv`, each KV head still has its own mean. RPC compresses what is decoded and never drops the prompt:
    `rpc(aggregation='all', keep=..., every=..., protect_prompt=True)`.

    RPC lets the budget grow by a quarter of each interval; here it is `keep`. Attention is the model's own, over all
    entries, and what is pooled are all entries; RPC's program leaves prompt and window out of both.
    """

    name = "rpc"
    paper = "arXiv:2505.13866"
    sinks = 4

    window: int = parameter(32, minimum=1)
    kernel: int = parameter(7, minimum=1, odd=True)
    aggregation: str = parameter("group", choices=("group", "all"))

    @property
    def needs(self) -> Needs:
        return Needs(WindowAttention(self.window))

    @property
    def recent(self) -> int:
        return self.window

    def score(self, observation: Observation) -> Scores:
        received = observation[WindowAttention(self.window)].mean
        if self.aggregation == "all":
            received = observation.mean_over_heads(received)
        return F.avg_pool1d(received, self.kernel, stride=1, padding=self.kernel // 2)
