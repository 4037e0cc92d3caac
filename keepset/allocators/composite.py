"""Composite tokens: the heads' first choices make one token, their second choices another, and layers compete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.allocators.layers import LayerAllocator, PerLayer, PerRequest, padded, pooled_counts
from keepset.core.method import parameter
from keepset.core.select import Ranking
from keepset.core.shapes import Scores


@dataclass(frozen=True)
class Composite(LayerAllocator):
    """Divides one budget among layers by composite tokens (KVCompose 2025, arXiv:2509.05165, section 3.3).

    Every head sorts its entries. The entries of one rank, over all heads of a layer, make a composite token, which is
    worth their mean (equation 19). The best composite tokens of all layers say how many each layer keeps (20 to 22),
    and every head keeps that many of its own best (23, 24). Scores should be comparable across layers, as attention is.

    Where the paper is silent: what always stays, and at least one entry, is the same in every layer and outside the
    pool. Of equal tokens those of better rank come first, over all layers.

    Attributes:
        aggregate_head: what a composite token is worth; a sum would order as the mean does.
        floor: share of the even budget that every layer keeps in any case. The paper's pool has none.
    """

    name = "composite"
    paper = "arXiv:2509.05165"

    aggregate_head: str = parameter("mean", choices=("max", "mean"))
    floor: float = parameter(0.0, minimum=0.0, maximum=1.0)

    def divided(self, rankings: Sequence[Ranking], rest: PerRequest, room: PerLayer) -> PerLayer:
        padded_scores = padded([ranking.scores for ranking in rankings])
        ranked = [(ranking.observation, scores) for ranking, scores in zip(rankings, padded_scores, strict=True)]
        values = torch.cat([each.split_layers(self._composite(scores)) for each, scores in ranked], 1)
        # Heads that hold different numbers after an event have as many tokens as they hold on average.
        exists = [(each, scores.isneginf().logical_not()) for each, scores in ranked]
        held = torch.cat([each.split_layers(-(-there.sum((1, 2)) // there.shape[1])) for each, there in exists], 1)
        rank = torch.arange(values.shape[-1], device=values.device) + (held - room)[..., None]
        values = values.gather(-1, rank.clamp(max=values.shape[-1] - 1))
        values = values.masked_fill(rank >= held[..., None], float("-inf"))
        even = rest.double() / room.shape[-1]
        least = (self.floor * even[:, None]).floor().long().minimum(room)
        return pooled_counts(values, rest, least)

    def _composite(self, ranked: Scores) -> Float[Tensor, "batch entries"]:
        """Return what each rank is worth, best first; -inf where no head has an entry of that rank.

        In double, because scores of what always stays are near the largest float32.
        """
        best_first = ranked.double().sort(dim=-1, descending=True).values
        if self.aggregate_head == "max":
            return best_first.amax(1)
        exists = ~best_first.isneginf()
        mean = best_first.where(exists, 0.0).sum(1) / exists.sum(1).clamp(min=1)
        return mean.masked_fill(~exists.any(1), float("-inf"))
