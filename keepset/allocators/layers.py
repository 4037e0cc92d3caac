"""Allocators that divide one budget among all layers or heads, and the arithmetic that they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.budget import Budget, share_of
from keepset.core.keep_set import KeepSet
from keepset.core.method import Allocator, Method
from keepset.core.observation import Observation
from keepset.core.select import Ranking, round_to_total, top_mask
from keepset.core.traits import Traits

PerRequest = Int[Tensor, " batch"]
PerLayer = Int[Tensor, "batch layers"]
PerPart = Int[Tensor, "batch parts"]


@dataclass(frozen=True)
class LayerAllocator(Allocator):
    """Gives every layer its number of entries; the scorer chooses inside a layer.

    Every layer keeps what always stays, or at least one entry; only the rest is divided. The sum over layers is the
    budget of all of them, rounded down to a multiple of the number of heads.
    """

    @property
    def own_traits(self) -> Traits:
        return Traits(equal_layers=False, across_layers=True, counts_from_data=True)

    def objection(self, inner: Method) -> str:
        if inner.traits.across_layers or not inner.traits.equal_layers:
            return f"{self.name} and {inner.name} both set how much every layer keeps: leave one of them out."
        return ""

    @abstractmethod
    def divided(self, rankings: Sequence[Ranking], rest: PerRequest, room: PerLayer) -> PerLayer:
        """Return how many more entries each layer keeps.

        Args:
            rankings: the entries of all layers, in order.
            rest: entries per head to divide among the layers of each request.
            room: the most that each layer can take.
        """

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        scorer, heads = self.scorer, observations[0].valid.shape[1]
        rankings = [scorer.ranked(each, budget, scorer.quotas(each.sizes, budget)) for each in observations]
        # Heads that hold different numbers count as their average, rounded up.
        existing = torch.cat([each.split_layers(-(-each.valid.sum((1, 2)) // heads)) for each in observations], 1)
        layers = existing.shape[1]
        total = (total_entries(observations, budget) // heads).clamp(min=layers).minimum(existing.sum(-1))
        always = torch.cat([each.split_layers(budget.always(each.sizes)) for each in observations], 1).clamp(min=1)
        always = always.minimum(existing).minimum(total[:, None] // layers)
        counts = always + self.divided(rankings, total - always.sum(-1), existing - always)
        parts, split = [], counts.split([len(each.layer_ids) for each in observations], 1)
        for ranking, count in zip(rankings, split, strict=True):
            seen = ranking.observation
            quotas = seen.sizes.entries.minimum(seen.merge_layers(count)[:, None])
            parts.append(scorer.choose(replace(ranking, quotas=quotas)))
        return KeepSet(parts)


def divide(shares: Float[Tensor, "batch parts"], total: PerRequest, room: PerPart) -> PerPart:
    """Return whole numbers in proportion to shares, of which none exceeds its room.

    They sum to `total`, or to all room if that is less. What does not fit a part goes to the others in proportion to
    their shares. If all shares are 0, they count as equal.

    Args:
        shares: a weight for each part, at least 0.
        total: the number to divide, for each request.
        room: the most that each part can take.
    """
    total = total.minimum(room.sum(-1))
    # Never quite zero, so that a part can take what others cannot.
    shares = shares.double() + 1e-9 * shares.double().amax(-1, keepdim=True).clamp(min=1e-100)
    # All parts fill at the pace of their shares; those with the least room for their share are full first.
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
    """Return how many entries all KV heads of all these layers may keep together.

    A fraction is taken of all entries together and then rounded down; it is never less than what always stays. If a
    layer or head has too few entries, others may keep more.
    """
    existing = torch.cat([each.split_layers(each.valid.sum((1, 2))) for each in observations], 1).sum(1)
    if budget.keep is None:
        return existing
    heads, first = sum(each.valid.shape[1] * len(each.layer_ids) for each in observations), observations[0]
    if isinstance(budget.keep, float):
        always, extra = (
            first.split_layers(part)[:, 0] * heads for part in (budget.always(first.sizes), budget.extra(first.sizes))
        )
        return (share_of(existing, budget.keep) + extra).maximum(always).clamp(min=1).minimum(existing)
    return (first.split_layers(budget.aim(first.sizes))[:, 0] * heads).minimum(existing)


def padded(ranked: Sequence[Float[Tensor, "_ kv_heads _"]]) -> list[Float[Tensor, "_ kv_heads entries"]]:
    """Return the ranked scores of several layers with equally many places; -inf where there is no entry."""
    longest = max(order.shape[-1] for order in ranked)
    return [F.pad(order, (0, longest - order.shape[-1]), value=float("-inf")) for order in ranked]


def pooled_counts(values: Float[Tensor, "batch parts entries"], total: PerRequest, least: PerPart) -> PerPart:
    """Return how many entries each part keeps if the best of all parts together stay.

    The counts sum to `total`, or to all entries if there are fewer. Among equal values the earlier places of all parts
    come first.

    Args:
        values: the score of each place; -inf where there is no entry.
        total: how many entries stay of each request.
        least: how many of its best entries each part keeps in any case: no more than it has, and together no more than
            `total`.
    """
    existing = values.isneginf().logical_not().sum((1, 2))
    certain_first = values.masked_fill(top_mask(values, least), float("inf"))
    # Place after place, the last first: `top_mask` takes the later of equal ones, and this way the parts share them.
    by_place = certain_first.flip(-1).transpose(1, 2)
    return top_mask(by_place.flatten(1), total.minimum(existing)).view_as(by_place).sum(1)
