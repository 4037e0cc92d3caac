"""One pool: the best entries of all heads of all layers stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from keepset.allocators.layers import padded, pooled_counts, total_entries
from keepset.core.budget import Budget
from keepset.core.keep_set import KeepSet
from keepset.core.method import Allocator, Method, parameter
from keepset.core.observation import Observation
from keepset.core.traits import Traits


@dataclass(frozen=True)
class Pool(Allocator):
    """Divides one budget among all heads of all layers by where the best scores are.

    This is the unstructured variant of KVCompose (2025, arXiv:2509.05165, appendix A.2) for any scorer: its sums over
    heads are left out. Scores must be comparable across layers, as attention is. Exactly the budget of all heads
    together is kept. Every head keeps what always stays, and at least one entry.

    Attributes:
        floor: share of the even budget that every head keeps in any case, as AdaKV's safeguard; the paper has none.
    """

    name = "pool"
    paper = "arXiv:2509.05165"
    own_traits = Traits(equal_heads=False, equal_layers=False, across_layers=True, counts_from_data=True)

    floor: float = parameter(0.2, minimum=0.0, maximum=1.0)

    def objection(self, inner: Method) -> str:
        inside = inner.traits
        if inside.across_layers or not (inside.equal_layers and inside.equal_heads):
            return f"{self.name} says how much every head keeps, and {inner.name} says so too: leave one of them out."
        return ""

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        scorer = self.scorer
        rankings = [scorer.ranked(each, budget, scorer.quotas(each.sizes, budget)) for each in observations]
        ranked = padded([ranking.scores for ranking in rankings])
        by_head = [each.split_layers(scores).flatten(1, 2) for each, scores in zip(observations, ranked, strict=True)]
        values = torch.cat(by_head, 1).double()  # which has room above the scores of what always stays
        existing = values.isneginf().logical_not().sum(-1)
        heads = existing.shape[-1]
        total = total_entries(observations, budget).clamp(min=heads).minimum(existing.sum(-1))
        least = (self.floor * total.double() / heads).floor().long().clamp(min=1)[:, None].minimum(existing)
        counts = pooled_counts(values, total, least).split([each.shape[1] for each in by_head], 1)
        chosen = [
            (ranking, each.merge_layers(of_heads.unflatten(1, (len(each.layer_ids), -1))))
            for each, ranking, of_heads in zip(observations, rankings, counts, strict=True)
        ]
        return KeepSet([scorer.choose(replace(ranking, quotas=quotas)) for ranking, quotas in chosen])
