"""SnapKV: what the last window of queries looks at."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F

from keepset.core.feature import Needs
from keepset.core.features.window import WindowAttention
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores


@dataclass(frozen=True)
class SnapKV(Method):
    """Keeps what the newest `window` queries attend to, smoothed along the text (Li et al. 2024, arXiv:2404.14469).

    The window's own entries always stay. Attention is averaged over the window, average-pooled with
    `kernel` over the entries before the window (zeros beyond the ends, as the authors' program does), and
    averaged over the query heads that share a KV head.
    """

    name = "snapkv"
    paper = "arXiv:2404.14469"

    window: int = parameter(64, minimum=1)
    kernel: int = parameter(5, minimum=1, odd=True)

    @property
    def needs(self) -> Needs:
        return Needs(WindowAttention(self.window))

    @property
    def recent(self) -> int:
        return self.window

    def score(self, observation: Observation) -> Scores:
        received = observation[WindowAttention(self.window)].mean
        in_window = observation.positions >= observation.lengths[:, None, None] - self.window
        return F.avg_pool1d(received.masked_fill(in_window, 0.0), self.kernel, stride=1, padding=self.kernel // 2)
