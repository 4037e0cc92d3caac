"""`ModelStatistics`: what was measured of the model beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from keepset.core.feature import Feature
from keepset.core.observation import Observation
from keepset.core.statistics import LayerStatistics, Statistics


@dataclass(frozen=True)
class ModelStatistics(Feature[Statistics]):
    """Statistics of the model, measured by `keepset calibrate`.

    Attributes:
        file: that holds them; "" for those offered for the model.
    """

    label = "statistics of the model"

    file: str

    def layer(self, observation: Observation) -> LayerStatistics:
        """The layer's, on the keys' device.

        Args:
            observation: of that layer.

        Raises:
            KeepsetError: nobody gave the statistics, or they are of a model of another shape.
        """
        _, kv_heads, _, head_dim = observation.keys.shape
        measured = observation[self].layer(observation.layer, observation.layers, kv_heads, head_dim)
        return measured.to(observation.keys.device)

    def retrieval(self, observation: Observation) -> Float[Tensor, "layers kv_heads"]:
        """How much the KV heads of all compressed layers retrieve, from 0 to 1 (DuoAttention, arXiv:2410.10819).

        Args:
            observation: of any of them.

        Raises:
            KeepsetError: nobody gave the statistics, they are of another model, or that was not measured.
        """
        self.layer(observation)  # or its own sentence
        return observation[self].gates().to(observation.keys.device)
