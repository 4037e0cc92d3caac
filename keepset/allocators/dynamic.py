"""DynamicKV: layers get what their best scores deserve among all layers so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from keepset.allocators.layers import LayerAllocator, PerLayer, PerRequest, divide, padded, pooled_counts
from keepset.core.method import parameter
from keepset.core.select import RECENT_RANK, Ranking


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

    def divided(self, rankings: Sequence[Ranking], rest: PerRequest, room: PerLayer) -> PerLayer:
        layers, heads = room.shape[1], rankings[0].scores.shape[1]
        mean = rest.double() / layers
        held = (mean[:, None] * self.r_max).ceil().long().minimum(room)
        # Scores of every head of every layer, without what always stays.
        divisible = padded([each.scores.masked_fill(each.scores >= RECENT_RANK, float("-inf")) for each in rankings])
        by_layer = [each.observation.split_layers(scores) for each, scores in zip(rankings, divisible, strict=True)]
        values = torch.cat(by_layer, 1).flatten(1, 2)
        shares = torch.zeros_like(mean)[:, None]
        for so_far in sorted({*range(self.interval, layers, self.interval), layers}):
            most = (mean * so_far * heads).floor().long()
            least = most.new_zeros(most.shape[0], so_far * heads)
            shares = pooled_counts(values[:, : so_far * heads], most, least).unflatten(1, (so_far, heads)).sum(-1)
            held[:, :so_far] = divide(shares.double(), rest, held[:, :so_far])
        # After an event layers hold different numbers, and some have no room for what others left them.
        return held + divide(shares.double(), rest - held.sum(-1), room - held)
