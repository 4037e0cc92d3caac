"""PyramidKV: many entries for the first layers, few for the last."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.budget import Budget
from keepset.core.method import Allocator, Method, parameter
from keepset.core.shapes import Quotas
from keepset.core.sizes import Sizes
from keepset.core.traits import Traits


@dataclass(frozen=True)
class Pyramid(Allocator):
    """Budgets that fall linearly with depth (Cai et al. 2024, arXiv:2406.02069, section 4.1).

    What always stays is the same in every layer. The rest, r entries on average, falls from 2r - r/beta in the first
    layer to r/beta in the last. If the text is too short for the first layer's share, the slope is the steepest that
    fits. Rounding keeps the sum over layers exactly layers x budget. After an event a layer that holds fewer entries
    than its number keeps what it has.

    With a `window` it is the form of kvpress and of the program of AMS' authors: the whole budget b falls from
    2b - b/beta to b/beta, and the first layer keeps at most the text less the window. If the last layer would keep
    fewer entries than the window, all layers keep b, as under the scorer alone. These programs round each layer by
    itself, so that a layer may keep one entry more or less.

    Attributes:
        beta: how steep the pyramid is; 1 for none.
        window: entries of the window in the form of kvpress, where it is 64; 0 for the form of the paper.
    """

    name = "pyramid"
    paper = "arXiv:2406.02069"
    own_traits = Traits(equal_layers=False)

    beta: float = parameter(20.0, minimum=1.0)
    window: int = parameter(0, minimum=0)

    def objection(self, inner: Method) -> str:
        twice = "pyramid: one pyramid inside another has no exact total: use it once."
        return twice if isinstance(inner, Pyramid) else ""

    def quotas(self, sizes: Sizes, budget: Budget) -> Quotas:
        average = self.scorer.quotas(sizes, budget)
        existing, layers = sizes.entries, len(sizes.layers)
        if layers == 1:
            return average
        most = existing
        if isinstance(budget.keep, int):
            # Layers hold different numbers after an event, on which their target must not depend.
            most = torch.maximum(existing, sizes.lengths[:, None])
            average = average.where(average < existing, most.minimum(budget.aim(sizes)[:, None]))
        always = average.minimum(budget.always(sizes)[:, None])
        same = torch.zeros_like(always) if self.window else always
        rest = (average - same).double()
        room = (most - same - self.window).double()
        first = (2 * rest - rest / self.beta).minimum(room)
        step = 2 * (first - rest) / (layers - 1)
        depths = sizes.depths[:, None]

        def before(depth: Int[Tensor, "batch 1"]) -> Quotas:
            """Return the entries of the first `depth` layers together; rounding these sums keeps the total exact."""
            return (depth * first - step * (depth * (depth - 1) // 2) + 1e-6).floor().long()

        falling = same + before(depths + 1) - before(depths)
        if self.window:
            last = 2 * rest - first
            falling = falling.where((first >= last) & (last >= always.clamp(min=self.window)), average)
        return falling.minimum(existing)
