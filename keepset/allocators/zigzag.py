"""ZigZagKV: layers with spread attention get more entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.allocators.layers import LayerAllocator, PerLayer, PerRequest, divide
from keepset.core.feature import Needs
from keepset.core.features.window import WindowAttention
from keepset.core.method import parameter
from keepset.core.observation import Observation
from keepset.core.select import Ranking
from keepset.core.traits import Traits


@dataclass(frozen=True)
class ZigZag(LayerAllocator):
    """Divides one budget by how many entries each layer's attention needs (Zhong et al. 2024, arXiv:2412.09036).

    A head's minimum budget is the smallest number of entries that receive the share `mass` of its attention. Its mean
    over a layer's heads, LMBA, divided by the sum over all layers, is the layer's uncertainty u. A layer gets
    B_bound + (B - B_bound) x layers x u, where B is the mean budget and B_bound = `floor` x B.

    Not checked against the paper: its authors published no program, and only the abstract of its text was available.
    The formula, `mass` and `floor` are what a port to kvpress (pull request 238, not merged) gives as the paper's
    equation 6; an earlier version of that port had a floor of 0.1. Where that is silent: attention is that of the
    newest `window` queries, summed over them, as in that earlier version. Each KV head has one minimum, by the mean
    over its query group. What always stays is outside the division. Entries that a layer cannot take go to the others.
    """

    name = "zigzag"
    paper = "arXiv:2412.09036"

    window: int = parameter(64, minimum=1)
    mass: float = parameter(0.9, minimum=0.0, maximum=1.0)
    floor: float = parameter(0.2, minimum=0.0, maximum=1.0)

    @property
    def own_traits(self) -> Traits:
        return replace(super().own_traits, needs=Needs(WindowAttention(self.window)))

    def divided(self, rankings: Sequence[Ranking], rest: PerRequest, room: PerLayer) -> PerLayer:
        seen = [ranking.observation for ranking in rankings]
        minima = torch.cat([each.split_layers(self._minimum(each)) for each in seen], 1)
        uncertainty = minima / minima.sum(-1, keepdim=True)
        return divide(torch.lerp(uncertainty, torch.full_like(uncertainty, 1 / room.shape[1]), self.floor), rest, room)

    def _minimum(self, observation: Observation) -> Float[Tensor, " batch"]:
        """Return a layer's minimum budget to maintain attention, in entries per head."""
        usage = observation[WindowAttention(self.window)].attention_sums.double().nan_to_num(0.0)
        reached = usage.sort(dim=-1, descending=True).values.cumsum(-1)
        # Sums of the same numbers in two orders differ by rounding.
        enough = self.mass * reached[..., -1:] * (1 - 1e-12)
        return ((reached < enough).sum(-1) + 1).double().mean(-1)
