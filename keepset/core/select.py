"""Selectors: from scores and quotas to a mask of what stays. Exact, ordered, and the same for every runtime."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.budget import Budget
from keepset.core.observation import Observation

_LARGEST = torch.finfo(torch.float32).max
RECENT_RANK = _LARGEST / 2
"""Where `ranked_scores` puts the recent suffix: above every score, below the sinks."""
LARGEST_SCORE = _LARGEST / 4
"""Scores that are larger, of either sign, are cut to this size."""


def ranked_scores(
    scores: Float[Tensor, "batch kv_heads entries"], observation: Observation, budget: Budget
) -> Float[Tensor, "batch kv_heads entries"]:
    """Scores in an order that selection can rely on, float32.

    From best to worst: sinks and a protected prompt (the first token first of all), the recent suffix, the scores,
    entries scored NaN, holes (-inf).
    """
    ranked = scores.float().clamp(-LARGEST_SCORE, LARGEST_SCORE).nan_to_num_(-2 * LARGEST_SCORE)
    ranked.masked_fill_(budget.is_recent(observation), RECENT_RANK)
    first = budget.first(observation).clamp(min=1)[:, None, None]
    sink_rank = _LARGEST * (1 - observation.positions.float() / (4 * first.float()))
    ranked = sink_rank.where(budget.is_sink(observation), ranked)
    return ranked.masked_fill_(~observation.valid, float("-inf"))


def top_mask(ranked: Float[Tensor, "*rows entries"], quotas: Int[Tensor, "*rows"]) -> Bool[Tensor, "*rows entries"]:
    """The `quotas` best entries of every row; of equal ones the later.

    The order is total, so that the same scores choose the same entries on every device and in every batch.
    """
    last = ranked.shape[-1] - 1
    best_first = last - ranked.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.arange(last + 1, device=ranked.device) < quotas[..., None]
    return torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, best_first, chosen)


def round_to_total(shares: Float[Tensor, "*rows parts"], total: Int[Tensor, "*rows"]) -> Int[Tensor, "*rows parts"]:
    """Whole numbers next to `shares` (which sum to `total`) whose sum is `total` exactly.

    Largest remainders are rounded up; of equal ones the earlier.
    """
    floors = shares.floor()
    missing = total - floors.sum(-1).long()
    order = (floors - shares).argsort(dim=-1, stable=True)
    raised = torch.arange(shares.shape[-1], device=shares.device) < missing[..., None]
    return floors.long() + torch.zeros_like(floors, dtype=torch.long).scatter(-1, order, raised.long())
