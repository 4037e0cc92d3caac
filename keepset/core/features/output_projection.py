"""`OutputProjection`: the weights that each query head's values go through after attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.core.feature import Feature
from keepset.core.observation import BLOCK, DEVICE_BLOCK, Observation


@dataclass(frozen=True)
class OutputProjection(Feature[Float[Tensor, "query_heads value_dim hidden"]]):
    """Of every query head, from its value to the layer's output, `[query_heads, value_dim, hidden]`."""

    label = "output projection"
    transformers_only = "looks at the output projection, which attention layers do not see"

    def norms(self, observation: Observation, order: int) -> Float[Tensor, "batch query_heads entries"]:
        """Norm of what each query head's output projection makes of each entry's value, `|W_O v|`, in float32.

        `order` 1 adds up the sizes of its numbers, 2 is its length. The projected values are made in blocks.
        """
        batch, kv_heads = observation.values.shape[:2]
        most = BLOCK if observation.values.device.type == "cpu" else DEVICE_BLOCK
        norms = []
        for head, group in enumerate(observation[self].unflatten(0, (kv_heads, -1)).unbind(0)):
            rows = max(1, most // (batch * group.shape[0] * group.shape[2]))
            blocks = [
                torch.linalg.vector_norm(values.float()[:, None] @ group.float(), ord=order, dim=-1)
                for values in observation.values[:, head].split(rows, 1)
            ]
            norms.append(torch.cat(blocks, -1))
        return torch.cat(norms, 1)
