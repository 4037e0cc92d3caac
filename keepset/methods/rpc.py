"""RPC, reasoning path compression: what the newest queries of a reasoning path look at."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.method import parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.methods.snapkv import SnapKV


@dataclass(frozen=True)
class RPC(SnapKV):
    """Keeps what a window of recent queries attends to, the same in every head (Song et al. 2025, arXiv:2505.13866).

    Attention of the `window` newest queries is averaged over them and over all heads of the layer, and
    average-pooled with `kernel` over the entries before the window, which always stays. The paper compresses
    while decoding and never drops the prompt: `rpc(keep=..., every=..., protect_prompt=True)`.

    The paper lets the budget grow by a quarter of each interval; here it is `keep`. Attention is the model's own, over
    all entries (the authors' program leaves prompt and window out of the softmax). Where heads hold different
    entries, as inside `adakv`, each KV head has the mean over its own query heads.
    """

    name = "rpc"
    paper = "arXiv:2505.13866"

    window: int = parameter(32, minimum=1)
    kernel: int = parameter(7, minimum=1, odd=True)

    def _received(self, observation: Observation) -> Scores:
        return observation.mean_over_heads(super()._received(observation))
