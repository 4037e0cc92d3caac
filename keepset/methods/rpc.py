"""RPC, reasoning path compression: what the newest queries of a reasoning path look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keepset.errors import KeepsetError
from keepset.method import Method, parameter
from keepset.observation import Needs, Observation


@dataclass(frozen=True)
class RPC(Method):
    """Keeps what a window of recent queries attends to, the same in every head (Song et al. 2025, arXiv:2505.13866).

    Attention of the `window` newest queries is averaged over them and over all heads of the layer, and
    average-pooled with `kernel` over the entries before the window, which always stays. The paper compresses
    while decoding and never drops the prompt: `rpc(keep=..., every=..., protect_prompt=True)`.

    The paper lets the budget grow by a quarter of each interval; here it is `keep`. Attention is the model's own, over
    all entries (the authors' program leaves prompt and window out of the softmax). Where heads hold different
    entries, as inside `adakv`, each KV head has the mean over its own query heads.
    """

    name: ClassVar[str] = "rpc"
    paper: ClassVar[str] = "arXiv:2505.13866"

    window: int = parameter(32, minimum=1)
    kernel: int = parameter(7, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise KeepsetError(f"rpc: kernel={self.kernel} has no middle: use an odd number.")

    @property
    def needs(self) -> Needs:
        """The window's queries."""
        return Needs(window=self.window)

    @property
    def recent(self) -> int:
        """The window."""
        return self.window

    def score(self, observation: Observation) -> Float[Tensor, "batch kv_heads entries"]:
        """Pooled mean attention of the window's queries."""
        received = observation.by_query_group(observation.window_usage(self.window)).mean(2) / self.window
        received = observation.mean_over_heads(received)
        in_window = observation.positions >= observation.lengths[:, None, None] - self.window
        return F.avg_pool1d(received.masked_fill(in_window, 0.0), self.kernel, stride=1, padding=self.kernel // 2)
