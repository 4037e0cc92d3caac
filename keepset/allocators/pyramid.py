"""PyramidKV: much for the first layers, little for the last."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.budget import Budget
from keepset.core.keep_set import Layout
from keepset.core.method import Allocator, Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Quotas


@dataclass(frozen=True)
class Pyramid(Allocator):
    """Budgets that fall linearly with depth (Cai et al. 2024, arXiv:2406.02069, section 4.1).

    What always stays is the same in every layer; the rest, r entries on average, falls from 2r - r/beta in
    the first layer to r/beta in the last. Where the text is too short for the first layer's share, the
    slope is the steepest that fits. Rounding keeps the sum over layers exactly layers x budget. After an
    event that is what layers aim at; one that holds less keeps what it has.
    """

    name = "pyramid"
    layout = Layout.LAYER_RAGGED
    paper = "arXiv:2406.02069"

    beta: float = parameter(20.0, minimum=1.0)

    def objection(self, inner: Method) -> str:
        twice = "pyramid: one pyramid inside another has no exact total: use it once."
        return twice if isinstance(inner, Pyramid) else ""

    def quotas(self, observation: Observation, budget: Budget) -> Quotas:
        average = self.scorer.quotas(observation, budget)
        existing = observation.valid.sum(-1)
        layers = len(observation.layers)
        if layers == 1:
            return average
        most = existing
        if isinstance(budget.keep, int):
            # Layers hold different numbers after an event: what they aim at must not depend on it.
            most = torch.maximum(existing, observation.lengths[:, None])
            average = average.where(average < existing, most.minimum(budget.aim(observation)[:, None]))
        always = average.minimum(budget.always(observation)[:, None])
        rest = (average - always).double()
        room = (most - always).double()
        first = (2 * rest - rest / self.beta).minimum(room)
        step = 2 * (first - rest) / (layers - 1)

        depths = observation.depths[:, None]

        def before(depth: Int[Tensor, "batch 1"]) -> Quotas:
            """Entries of the first `depth` layers; rounding sums instead of layers keeps the total."""
            return (depth * first - step * (depth * (depth - 1) // 2) + 1e-6).floor().long()

        return (always + before(depths + 1) - before(depths)).minimum(existing)
