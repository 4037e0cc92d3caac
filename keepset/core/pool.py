"""One budget for several parts (layers, or heads of layers): the best of all their entries decide who keeps what."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.budget import Budget, share_of
from keepset.core.observation import Observation
from keepset.core.select import top_mask


def total_entries(observations: Sequence[Observation], budget: Budget) -> Int[Tensor, " batch"]:
    """Entries that all KV heads of all these layers may keep together, for every request.

    A fraction is taken of all entries at once, and only then rounded down. What some layers or heads are too short
    for, the others may keep.
    """
    existing = torch.stack([observation.valid.sum((1, 2)) for observation in observations]).sum(0)
    if budget.keep is None:
        return existing
    if isinstance(budget.keep, float):
        return share_of(existing, budget.keep).clamp(min=1)
    heads = sum(observation.keys.shape[1] for observation in observations)
    return (budget.aim(observations[0]) * heads).minimum(existing)


def padded(ranked: Sequence[Float[Tensor, "batch kv_heads _"]]) -> list[Float[Tensor, "batch kv_heads entries"]]:
    """Rankings of several layers with as many places each: -inf where there is no entry."""
    longest = max(order.shape[-1] for order in ranked)
    return [F.pad(order, (0, longest - order.shape[-1]), value=float("-inf")) for order in ranked]


def pooled_counts(
    values: Float[Tensor, "batch parts entries"], total: Int[Tensor, " batch"], least: Int[Tensor, "batch parts"]
) -> Int[Tensor, "batch parts"]:
    """How many entries each part keeps when the `total` best of all stay, each part's `least` best in any case.

    Places without an entry are -inf. The counts sum to `total`, or to all entries where there are fewer; where the
    least of all parts exceed it, the best of those stay. Of equal values the earlier places of all parts come first.
    """
    exists = ~values.isneginf()
    certain = top_mask(values, least) & exists
    # Above all others, and still in their own order.
    ranks = values.argsort(dim=-1, stable=True).argsort(-1).to(values.dtype)
    largest = torch.finfo(values.dtype).max
    raised = values.clamp(max=largest / 2).where(~certain, largest / 2 * (1 + (ranks + 1) / values.shape[-1]))
    # Place after place, the last first, because of equal ones the later is taken: ties are shared, not taken by one.
    flat = raised.flip(-1).transpose(1, 2).flatten(1)
    chosen = top_mask(flat, total.minimum(exists.sum((1, 2)))).unflatten(1, (values.shape[2], -1))
    return chosen.sum(1)
