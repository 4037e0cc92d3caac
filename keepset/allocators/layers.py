"""Allocators that divide one budget among layers (PyramidKV, DynamicKV, ZigZagKV), and how numbers are divided."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.budget import Budget, share_of
from keepset.core.feature import Needs
from keepset.core.features.queries import WindowAttention
from keepset.core.keep_set import KeepSet
from keepset.core.method import Allocator, Method, parameter
from keepset.core.observation import Observation
from keepset.core.select import RECENT_RANK, Ranking, round_to_total, top_mask
from keepset.core.shapes import Quotas
from keepset.core.sizes import Sizes
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
    def divided(self, rankings: Sequence[Ranking], remaining: PerRequest, room: PerLayer) -> PerLayer:
        """Return how many more entries each layer keeps.

        Args:
            rankings: the entries of all layers, in order.
            remaining: entries per head to divide among the layers of each request.
            room: the most that each layer can take.
        """

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        scorer, heads = self.scorer, observations[0].valid.shape[1]
        rankings = [scorer.ranked(layer, budget, scorer.quotas(layer.sizes, budget)) for layer in observations]
        # Heads that hold different numbers count as their average, rounded up.
        existing = torch.cat([layer.split_layers(-(-layer.valid.sum((1, 2)) // heads)) for layer in observations], 1)
        layers = existing.shape[1]
        total = (total_entries(observations, budget) // heads).clamp(min=layers).minimum(existing.sum(-1))
        always = torch.cat([layer.split_layers(budget.always(layer.sizes)) for layer in observations], 1).clamp(min=1)
        always = always.minimum(existing).minimum(total[:, None] // layers)
        counts = always + self.divided(rankings, total - always.sum(-1), existing - always)
        parts, split = [], counts.split([len(layer.layer_ids) for layer in observations], 1)
        for ranking, count in zip(rankings, split, strict=True):
            observation = ranking.observation
            quotas = observation.sizes.entries.minimum(observation.merge_layers(count)[:, None])
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

    Args:
        observations: of all layers, in order.
        budget: the recipe's budget, in entries.
    """
    existing = torch.cat([layer.split_layers(layer.valid.sum((1, 2))) for layer in observations], 1).sum(1)
    if budget.keep is None:
        return existing
    heads, first = sum(layer.valid.shape[1] * len(layer.layer_ids) for layer in observations), observations[0]
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
        remaining = (average - same).double()
        room = (most - same - self.window).double()
        first = (2 * remaining - remaining / self.beta).minimum(room)
        step = 2 * (first - remaining) / (layers - 1)
        depths = sizes.depths[:, None]

        def before(depth: Int[Tensor, "batch 1"]) -> Quotas:
            """Return the entries of the first `depth` layers together; rounding these sums keeps the total exact."""
            return (depth * first - step * (depth * (depth - 1) // 2) + 1e-6).floor().long()

        falling = same + before(depths + 1) - before(depths)
        if self.window:
            last = 2 * remaining - first
            falling = falling.where((first >= last) & (last >= always.clamp(min=self.window)), average)
        return falling.minimum(existing)


@dataclass(frozen=True)
class Dynamic(LayerAllocator):
    """Budgets of layers from a pool of their scores, updated every few layers (Zhou et al. 2024, arXiv:2412.14838).

    Algorithm 1: a layer first holds `r_max` times the mean budget. After every `interval` layers, the best scores of
    all layers and heads so far are counted, as many as these layers have budget on average. The budget of all layers
    is divided among the layers so far in proportion to the counts; an update never raises a layer's number. The authors
    score with `dynamic(snapkv(window=8, kernel=7))`.

    Where the paper is silent: the last layers are updated too if their number is no multiple of `interval`, so that
    the total is exact. What a layer cannot take goes to the others in proportion; in the authors' program the newest
    layer gets all that rounding leaves. The runtime holds the prompt until its last layer, so updates save no memory.
    """

    name = "dynamic"
    paper = "arXiv:2412.14838"

    r_max: float = parameter(10.0, minimum=1.0)
    interval: int = parameter(4, minimum=1)

    def divided(self, rankings: Sequence[Ranking], remaining: PerRequest, room: PerLayer) -> PerLayer:
        layers, heads = room.shape[1], rankings[0].scores.shape[1]
        mean = remaining.double() / layers
        counts = (mean[:, None] * self.r_max).ceil().long().minimum(room)
        # Scores of every head of every layer, without what always stays.
        divisible = padded(
            [ranking.scores.masked_fill(ranking.scores >= RECENT_RANK, float("-inf")) for ranking in rankings]
        )
        by_layer = [
            ranking.observation.split_layers(scores) for ranking, scores in zip(rankings, divisible, strict=True)
        ]
        values = torch.cat(by_layer, 1).flatten(1, 2)
        shares = torch.zeros_like(mean)[:, None]
        for so_far in sorted({*range(self.interval, layers, self.interval), layers}):
            most = (mean * so_far * heads).floor().long()
            least = most.new_zeros(most.shape[0], so_far * heads)
            shares = pooled_counts(values[:, : so_far * heads], most, least).unflatten(1, (so_far, heads)).sum(-1)
            counts[:, :so_far] = divide(shares.double(), remaining, counts[:, :so_far])
        # After an event layers hold different numbers, and some have no room for what others left them.
        return counts + divide(shares.double(), remaining - counts.sum(-1), room - counts)


@dataclass(frozen=True)
class ZigZag(LayerAllocator):
    """Divides one budget by how many entries each layer's attention needs (Zhong et al. 2024, arXiv:2412.09036).

    A head's minimum budget is the smallest number of entries that receive the share `mass` of its attention. Its mean
    over a layer's heads, LMBA, divided by the sum over all layers, is the layer's uncertainty u. A layer gets
    B_bound + (B - B_bound) x layers x u, where B is the mean budget and B_bound = `floor` x B.

    Not checked against the paper: its authors published no program, and only the abstract of its text was available.
    The formula, `mass` and `floor` are what a port to kvpress (pull request 238, not merged) gives as the paper's
    equation 6; an earlier version of that port had a floor of 0.1. Where that is silent: attention is that of the
    newest `window` queries, summed over them, as in that earlier version. Each KV head has one minimum, by the mean
    over its query group. What always stays is outside the division. Entries that a layer cannot take go to the others.
    """

    name = "zigzag"
    paper = "arXiv:2412.09036"

    window: int = parameter(64, minimum=1)
    mass: float = parameter(0.9, minimum=0.0, maximum=1.0)
    floor: float = parameter(0.2, minimum=0.0, maximum=1.0)

    @property
    def own_traits(self) -> Traits:
        return replace(super().own_traits, needs=Needs(WindowAttention(self.window)))

    def divided(self, rankings: Sequence[Ranking], remaining: PerRequest, room: PerLayer) -> PerLayer:
        observations = [ranking.observation for ranking in rankings]
        minima = torch.cat([layer.split_layers(self._minimum(layer)) for layer in observations], 1)
        uncertainty = minima / minima.sum(-1, keepdim=True)
        return divide(
            torch.lerp(uncertainty, torch.full_like(uncertainty, 1 / room.shape[1]), self.floor), remaining, room
        )

    def _minimum(self, observation: Observation) -> Float[Tensor, " batch"]:
        """Return a layer's minimum budget to maintain attention, in entries per head."""
        usage = observation[WindowAttention(self.window)].attention_sums.double().nan_to_num(0.0)
        reached = usage.sort(dim=-1, descending=True).values.cumsum(-1)
        # Sums of the same numbers in two orders differ by rounding.
        enough = self.mass * reached[..., -1:] * (1 - 1e-12)
        return ((reached < enough).sum(-1) + 1).double().mean(-1)
