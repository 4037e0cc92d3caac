"""One budget for all layers together, or all heads of them: what they hold says how much each gets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.budget import Budget, share_of
from keepset.core.keep_set import KeepSet, Layout
from keepset.core.method import Allocator, Method
from keepset.core.observation import Observation
from keepset.core.select import Ranking, round_to_total, top_mask

PerRequest = Int[Tensor, " batch"]
PerLayer = Int[Tensor, "batch layers"]
PerPart = Int[Tensor, "batch parts"]


@dataclass(frozen=True)
class LayerAllocator(Allocator):
    """Gives every layer its number of entries; inside a layer it is the scorer that chooses.

    What always stays, and one entry in any case, is the same in every layer; only the rest is divided. The sum over
    layers is exactly what the budget says of all of them, as far as that is a multiple of the number of heads.
    """

    layout = Layout.LAYER_RAGGED
    across_layers = True
    counts_from_data = True

    def objection(self, inner: Method) -> str:
        if inner.across_layers or not inner.equal_layers:
            return f"{self.name} says how much every layer keeps, and so does {inner.name}: leave one of them out."
        return ""

    @abstractmethod
    def divided(self, rankings: Sequence[Ranking], rest: PerRequest, room: PerLayer) -> PerLayer:
        """The `rest` of every request, divided among its layers, none of which takes more than its `room`."""

    def select(self, observation: Observation, budget: Budget) -> KeepSet:
        return self.select_all([observation], budget)

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        scorer, heads = self.scorer, observations[0].valid.shape[1]
        rankings = [scorer.ranked(each, budget, scorer.quotas(each, budget)) for each in observations]
        existing = torch.cat([each.split_layers(-(-each.valid.sum((1, 2)) // heads)) for each in observations], 1)
        layers = existing.shape[1]
        total = (total_entries(observations, budget) // heads).clamp(min=layers).minimum(existing.sum(-1))
        always = torch.cat([each.split_layers(budget.always(each)) for each in observations], 1).clamp(min=1)
        always = always.minimum(existing).minimum(total[:, None] // layers)
        counts = always + self.divided(rankings, total - always.sum(-1), existing - always)
        parts = []
        for ranking, count in zip(
            rankings, counts.split([len(each.layer_ids) for each in observations], 1), strict=True
        ):
            quotas = ranking.observation.valid.sum(-1).minimum(ranking.observation.merge_layers(count)[:, None])
            parts.append(scorer.choose(replace(ranking, quotas=quotas)))
        return KeepSet(parts)


def divide(shares: Float[Tensor, "batch parts"], total: PerRequest, room: PerPart) -> PerPart:
    """Whole numbers in proportion to `shares`, of which none exceeds its `room`.

    They sum to `total`, or to all room where that is less. What does not fit a part goes to the others, in proportion
    to their shares. Where nobody has a share, all have the same.
    """
    total = total.minimum(room.sum(-1))
    # Never quite zero: what others cannot take has to go somewhere.
    shares = shares.double() + 1e-9 * shares.double().amax(-1, keepdim=True).clamp(min=1e-100)
    # Filling all parts at the pace of their shares, those with the least room for their share are full first.
    full = room / shares
    order = full.argsort(-1)
    sorted_room, sorted_shares = room.gather(-1, order), shares.gather(-1, order)
    left = total[:, None] - (sorted_room.cumsum(-1) - sorted_room)
    level = left / sorted_shares.flip(-1).cumsum(-1).flip(-1)
    fits = level <= full.gather(-1, order)
    first = fits.int().argmax(-1, keepdim=True)
    ideal = (shares * level.gather(-1, first)).minimum(room.double())
    return round_to_total(ideal.where(fits.any(-1, keepdim=True), room.double()), total)


def total_entries(observations: Sequence[Observation], budget: Budget) -> PerRequest:
    """Entries that all KV heads of all these layers may keep together, for every request.

    A fraction is taken of all entries at once, and only then rounded down; it is never less than always stays. What
    some layers or heads are too short for, the others may keep.
    """
    existing = torch.cat([each.split_layers(each.valid.sum((1, 2))) for each in observations], 1).sum(1)
    if budget.keep is None:
        return existing
    heads, first = sum(each.valid.shape[1] * len(each.layer_ids) for each in observations), observations[0]
    if isinstance(budget.keep, float):
        always = first.split_layers(budget.always(first))[:, 0] * heads
        return share_of(existing, budget.keep).maximum(always).clamp(min=1).minimum(existing)
    return (first.split_layers(budget.aim(first))[:, 0] * heads).minimum(existing)


def padded(
    ranked: Sequence[Float[Tensor, "_ kv_heads _"]],
) -> list[Float[Tensor, "_ kv_heads entries"]]:
    """Rankings of several layers with as many places each: -inf where there is no entry."""
    longest = max(order.shape[-1] for order in ranked)
    return [F.pad(order, (0, longest - order.shape[-1]), value=float("-inf")) for order in ranked]


def pooled_counts(values: Float[Tensor, "batch parts entries"], total: PerRequest, least: PerPart) -> PerPart:
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
