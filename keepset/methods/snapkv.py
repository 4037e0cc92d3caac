"""SnapKV: keep what the last window of queries attends to."""

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
class SnapKV(Method):
    """Keeps what the newest `window` queries attend to, smoothed along the text (Li et al. 2024, arXiv:2404.14469).

    The window's own entries always stay. Attention is averaged over the window, average-pooled with `kernel` over the
    entries before the window (zeros beyond the ends, as in the authors' program), and averaged over the query heads
    that share a KV head.
    """

    name = "snapkv"
    paper = "arXiv:2404.14469"

    window: int = parameter(64, minimum=1)
    kernel: int = parameter(5, minimum=1, odd=True)

    @cached_property
    def traits(self) -> Traits:
        return Traits(needs=Needs(WindowAttention(self.window)), recent=self.window)

    def score(self, observation: Observation) -> Scores:
        sums = observation[WindowAttention(self.window)]
        received = sums.attention_sums / sums.window
        in_window = observation.positions >= observation.lengths[:, None, None] - self.window
        return F.avg_pool1d(received.masked_fill(in_window, 0.0), self.kernel, stride=1, padding=self.kernel // 2)
