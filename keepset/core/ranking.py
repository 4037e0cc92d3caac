"""`Ranking`: the entries of one layer in an order, and how many of them are to stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from keepset.core.budget import Budget
from keepset.core.keep_set import LayerKeepSet
from keepset.core.observation import Observation
from keepset.core.select import top_mask
from keepset.core.shapes import Mask, Quotas, Scores


@dataclass(frozen=True, eq=False)
class Ranking:
    """What is known of a layer when it comes to choosing.

    Attributes:
        observation: the layer.
        budget: the recipe's.
        scores: of every entry, with what always stays above the rest and -inf where there is no entry; see
            `ranked_scores`.
        quotas: how many entries every KV head keeps.
        state: the method's own numbers per entry after this event, `[batch, kv_heads, entries]`.
    """

    observation: Observation
    budget: Budget
    scores: Scores
    quotas: Quotas
    state: Mapping[str, Tensor]

    def best(self) -> LayerKeepSet:
        """The best entries of every head, as many as its quota; of equal ones the later."""
        return self.keep(top_mask(self.scores, self.quotas))

    def keep(self, mask: Mask, **state: Tensor) -> LayerKeepSet:
        """The entries where `mask` is true, holes left out.

        Args:
            mask: of the entries that stay.
            **state: numbers per entry that are new or have changed.
        """
        seen = self.observation
        state = {**self.state, **state}
        return LayerKeepSet.from_mask(seen.layer, mask & seen.valid, seen.positions, seen.entry_bytes, state)
