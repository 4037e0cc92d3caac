"""One budget for all layers, by where the best scores are: `pool` compares entries, `composite` composite tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.allocators.layers import (
    LayerAllocator,
    PerLayer,
    PerPart,
    PerRequest,
    padded,
    pooled_counts,
    total_entries,
)
from keepset.core.budget import Budget
from keepset.core.keep_set import KeepSet
from keepset.core.method import Allocator, Method, parameter
from keepset.core.observation import Observation
from keepset.core.select import Ranking
from keepset.core.shapes import Scores
from keepset.core.traits import Traits, neighbours


@dataclass(frozen=True)
class Pool(Allocator):
    """Divides one budget among all heads of all layers by where the best scores are.

    This is the unstructured variant of KVCompose (2025, arXiv:2509.05165, appendix A.2) for any scorer: its sums over
    heads are left out. Scores must be comparable across layers, as attention is. Exactly the budget of all heads
    together is kept. Every head keeps what always stays, and at least one entry.

    Attributes:
        floor: share of the even budget that every head keeps in any case, as AdaKV's safeguard; the paper has none.
        groups: into how many groups of neighbouring layers they are divided, so that the layers of a group keep equally
            many entries; 0 divides none. A server frees memory for such groups, so what it holds is then the budget.
    """

    name = "pool"
    paper = "arXiv:2509.05165"

    floor: float = parameter(0.2, minimum=0.0, maximum=1.0)
    groups: int = parameter(0, minimum=0)

    @property
    def own_traits(self) -> Traits:
        return Traits(
            equal_heads=False,
            equal_layers=False,
            across_layers=True,
            counts_from_data=True,
            layer_groups=self.groups,
        )

    def objection(self, inner: Method) -> str:
        inside = inner.traits
        if inside.across_layers or not (inside.equal_layers and inside.equal_heads):
            return f"{self.name} and {inner.name} both set how much every head keeps: leave one of them out."
        return ""

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        scorer = self.scorer
        rankings = [scorer.ranked(layer, budget, scorer.quotas(layer.sizes, budget)) for layer in observations]
        ranked = padded([ranking.scores for ranking in rankings])
        by_head = [
            observation.split_layers(scores).flatten(1, 2)
            for observation, scores in zip(observations, ranked, strict=True)
        ]
        values = torch.cat(by_head, 1)
        existing = values.isneginf().logical_not().sum(-1)
        heads = existing.shape[-1]
        total = total_entries(observations, budget).clamp(min=heads).minimum(existing.sum(-1))
        least = (self.floor * total.double() / heads).floor().long().clamp(min=1)[:, None].minimum(existing)
        counts = pooled_counts(values, total, least)
        if self.groups:
            heads_of = [scores.shape[1] // len(of.layer_ids) for of, scores in zip(observations, by_head, strict=True)]
            by_layer = [heads for of, heads in zip(observations, heads_of, strict=True) for _ in of.layer_ids]
            counts = self._evened(values, counts, least.expand_as(existing), by_layer)
        of_observations = counts.split([scores.shape[1] for scores in by_head], 1)
        chosen = [
            (ranking, observation.merge_layers(of_heads.unflatten(1, (len(observation.layer_ids), -1))))
            for observation, ranking, of_heads in zip(observations, rankings, of_observations, strict=True)
        ]
        return KeepSet([scorer.choose(replace(ranking, quotas=quotas)) for ranking, quotas in chosen])

    def _evened(
        self, values: Float[Tensor, "batch heads entries"], counts: PerPart, least: PerPart, heads: Sequence[int]
    ) -> PerPart:
        """Return how many entries each head keeps if the layers of a group share theirs evenly.

        The first layers of a group keep what cannot be divided. In each layer the best entries of its heads stay. If a
        layer holds fewer entries, it keeps them all.

        Args:
            values: the score of each entry, head after head and layer after layer; -inf where there is none.
            counts: how many entries each head keeps without groups.
            least: how many each head keeps in any case.
            heads: how many heads each layer has.
        """
        by_layer = [part.split(list(heads), 1) for part in (counts, values, least)]
        evened = []
        for group in neighbours(len(heads), min(self.groups, len(heads))):
            total = torch.stack([by_layer[0][layer].sum(1) for layer in group]).sum(0)
            for place, layer in enumerate(group):
                share, certain = (total + len(group) - 1 - place) // len(group), by_layer[2][layer]
                evened.append(pooled_counts(by_layer[1][layer], share.maximum(certain.sum(1)), certain))
        return torch.cat(evened, 1)


@dataclass(frozen=True)
class Composite(LayerAllocator):
    """Divides one budget among layers by composite tokens (KVCompose 2025, arXiv:2509.05165, section 3.3).

    Every head sorts its entries. The entries of one rank, over all heads of a layer, make a composite token, whose
    score is their mean (equation 19). The best composite tokens of all layers decide how many each layer keeps (20 to
    22), and every head keeps that many of its own best (23, 24). Scores should be comparable across layers, as
    attention is.

    Where the paper is silent: tokens that always stay, or at least one entry, are kept in every layer, outside the
    pool. Among equal tokens those of better rank come first, over all layers.

    Attributes:
        aggregate_head: the score of a composite token; a sum would order as the mean does.
        floor: share of the even budget that every layer keeps in any case. The paper's pool has none.
    """

    name = "composite"
    paper = "arXiv:2509.05165"

    aggregate_head: str = parameter("mean", choices=("max", "mean"))
    floor: float = parameter(0.0, minimum=0.0, maximum=1.0)

    def divided(self, rankings: Sequence[Ranking], remaining: PerRequest, room: PerLayer) -> PerLayer:
        padded_scores = padded([ranking.scores for ranking in rankings])
        ranked = [(ranking.observation, scores) for ranking, scores in zip(rankings, padded_scores, strict=True)]
        values = torch.cat([observation.split_layers(self._composite(scores)) for observation, scores in ranked], 1)
        # Heads that hold different numbers after an event have as many tokens as they hold on average.
        exists = [(observation, scores.isneginf().logical_not()) for observation, scores in ranked]
        existing = torch.cat(
            [
                observation.split_layers(-(-entry_exists.sum((1, 2)) // entry_exists.shape[1]))
                for observation, entry_exists in exists
            ],
            1,
        )
        rank = torch.arange(values.shape[-1], device=values.device) + (existing - room)[..., None]
        values = values.gather(-1, rank.clamp(max=values.shape[-1] - 1))
        values = values.masked_fill(rank >= existing[..., None], float("-inf"))
        even = remaining.double() / room.shape[-1]
        least = (self.floor * even[:, None]).floor().long().minimum(room)
        # The first ranks are certain. `pooled_counts` takes the later of equal places, and here places are ranks.
        certain = torch.arange(values.shape[-1], device=values.device) < least[..., None]
        return pooled_counts(values.masked_fill(certain, float("inf")), remaining, least)

    def _composite(self, ranked: Scores) -> Float[Tensor, "batch entries"]:
        """Return the score of each rank, best first; -inf where no head has an entry of that rank.

        In double, because scores of what always stays are near the largest float32.
        """
        best_first = ranked.double().sort(dim=-1, descending=True).values
        if self.aggregate_head == "max":
            return best_first.amax(1)
        exists = ~best_first.isneginf()
        mean = best_first.where(exists, 0.0).sum(1) / exists.sum(1).clamp(min=1)
        return mean.masked_fill(~exists.any(1), float("-inf"))
