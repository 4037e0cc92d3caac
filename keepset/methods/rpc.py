"""RPC, reasoning path compression: keep what the newest queries of a reasoning path attend to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch.nn.functional as F

from keepset.core.feature import Needs
from keepset.core.features.window import WindowAttention
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.core.traits import Traits


@dataclass(frozen=True)
class RPC(Method):
    """Keeps what a window of recent queries attends to (Song et al. 2025, arXiv:2505.13866).

    Attention of the `window` newest queries is averaged over them and over query heads, and average-pooled with
    `kernel`. The heads are those that share a KV head, and the first four tokens and the window always stay, as in the
    AMS paper's comparison (table 11) and its authors' program. With `aggregation="all"` the mean is over all heads of
    the layer, as in RPC's own formula and program; both names are its program's. If heads hold different entries, as
    inside `adakv`, each KV head still has its own mean. RPC compresses only decoded tokens:
    `rpc(aggregation='all', keep=..., every=..., protect_prompt=True)`.

    RPC lets the budget grow by a quarter of each interval; here `keep` is fixed. Attention is the model's own, over all
    entries, and all entries are pooled; RPC's program leaves prompt and window out of both.
    """

    name = "rpc"
    paper = "arXiv:2505.13866"

    window: int = parameter(32, minimum=1)
    kernel: int = parameter(7, minimum=1, odd=True)
    aggregation: str = parameter("group", choices=("group", "all"))

    @cached_property
    def traits(self) -> Traits:
        return Traits(needs=Needs(WindowAttention(self.window)), sinks=4, recent=self.window)

    def score(self, observation: Observation) -> Scores:
        sums = observation[WindowAttention(self.window)]
        received = sums.attention_sums / sums.window
        if self.aggregation == "all":
            received = observation.mean_over_heads(received)
        return F.avg_pool1d(received, self.kernel, stride=1, padding=self.kernel // 2)
