"""Segments of a text: where to cut it by mass, and how to divide a head's quota among the pieces.

All of it for every request and KV head at once: no loop over heads or segments, nothing that waits for a device.
"""

from __future__ import annotations

from math import ceil

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.select import round_to_total
from keepset.core.shapes import Mask, Quotas, Scores

PerEntry = Int[Tensor, "batch kv_heads entries"]
"""A whole number for every entry."""

PerSegment = Int[Tensor, "batch kv_heads segments"]
"""A whole number for every segment."""

Weights = Float[Tensor, "batch kv_heads segments"]
"""A number for every segment, in double."""

_BY_RADIX = 1 << 15
"""So many whole numbers torch sorts by radix on a CPU, if they are a single row; fewer are sorted sooner in rows."""


def cut_by_mass(filled: Scores, order: PerEntry, share: float, shortest: int, longest: int) -> PerSegment:
    """Where segments end: how many entries there are up to there.

    Of every entry, `order` is that number, and `filled` the mass up to there, in double. A head is cut wherever another
    `share` of its mass is full, behind the entry that fills it. Then a segment that is shorter than `shortest` is
    joined with the next one (the last with the one before), and one that is longer than `longest` is divided into as
    few equal parts as it takes; as long as `longest` is twice `shortest` or more, all segments of longer texts are
    within these lengths. AMS, section 3.3 and algorithm 1, lines 13 to 23. Segments that a head has not end where its
    last one does.
    """
    count = order[..., -1:]
    thresholds = share * torch.arange(1, ceil(1 / share - 1e-9), device=filled.device, dtype=torch.double)
    entry = torch.searchsorted(filled, thresholds.expand(*filled.shape[:-1], -1).contiguous())
    cuts = order.gather(-1, entry.clamp(max=filled.shape[-1] - 1))
    return _divided(torch.cat([_far_enough(cuts, count, shortest), count], -1), longest, filled.shape[-1])


def cut_by_length(order: PerEntry, length: int) -> PerSegment:
    """The same for segments of a fixed length."""
    ends = length * torch.arange(1, -(-order.shape[-1] // length) + 1, device=order.device)
    return order[..., -1:].minimum(ends)


def sums(filled: Scores, order: PerEntry, ends: PerSegment) -> Weights:
    """The mass of every segment."""
    last = torch.searchsorted(order, ends)
    return filled.gather(-1, last).diff(dim=-1, prepend=torch.zeros_like(filled[..., :1]))


def divide(quotas: Quotas, mass: Weights, length: Weights, minimum: Weights, fixed: Weights) -> PerSegment:
    """How many entries every segment keeps: exactly `quotas` in sum.

    Every segment gets its `minimum`, and of the rest what is in proportion to its mass, but never less than the
    `fixed` entries that it has to keep nor more than its `length`. What such a bound takes or gives the others share
    in the same proportion. Whole numbers next to these shares sum to the quota. Where not even the minima fit, the
    segments of least mass go without.
    """
    total = quotas.double().minimum(length.sum(-1))[..., None]
    minimum = _affordable(total - fixed.sum(-1, keepdim=True), mass, minimum, fixed)
    lower = minimum.maximum(fixed)
    level = _level(total, mass, minimum, lower, length)
    shares = (minimum + level * mass).clamp(min=lower, max=length)
    return round_to_total(shares, total[..., 0].long())


def top_of_segments(ranked: Scores, segment: PerEntry, ends: PerSegment, quotas: PerSegment) -> Mask:
    """The `quotas` best entries of every segment; of equal ones the later, and of holes (-inf) none.

    One sort of whole numbers, which are in the order of (segment, score); floating-point numbers of one sign are in
    the order of their bits.
    """
    bits = (ranked.float() + 0.0).view(torch.int32)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    mine = segment.where(ranked > float("-inf"), quotas.shape[-1])  # holes behind all segments
    keys, worst_first = _sorted_rows((mine << 32) + rising, (quotas.shape[-1] + 1) << 32)
    begins = F.pad(ends - quotas, (0, 1), value=ranked.shape[-1])
    chosen = torch.arange(ranked.shape[-1], device=ranked.device) >= begins.gather(-1, (keys + (1 << 31)) >> 32)
    return torch.zeros_like(chosen).scatter(-1, worst_first, chosen)


def _sorted_rows(keys: PerEntry, span: int) -> tuple[PerEntry, PerEntry]:
    """Every row's keys (within one span of numbers) in rising order, and their places; of equal ones the first."""
    if keys.numel() < _BY_RADIX:
        return torch.sort(keys, dim=-1, stable=True)
    row = torch.arange(keys[..., 0].numel(), device=keys.device).view(*keys.shape[:2], 1)
    rising, place = torch.sort((keys + row * span).flatten(), stable=True)
    return rising.view_as(keys) - row * span, place.view_as(keys) - row * keys.shape[-1]


def _far_enough(
    cuts: Int[Tensor, "batch kv_heads cuts"], count: Int[Tensor, "batch kv_heads 1"], shortest: int
) -> Int[Tensor, "batch kv_heads cuts"]:
    """Cuts of which each is `shortest` entries behind the one before, the first that are; the others are `count`.

    From every cut there is one next that is far enough. Which of them the way from the beginning passes is found by
    doubling its steps.
    """
    number = cuts.shape[-1]
    targets = torch.cat([cuts, torch.zeros_like(count)], -1) + shortest
    following = torch.searchsorted(cuts, targets.contiguous())
    step = torch.cat([following[..., :-1], torch.full_like(count, number)], -1)
    passed = torch.zeros_like(step).scatter(-1, following[..., -1:], 1)
    for _ in range(number.bit_length()):
        passed = passed.scatter_reduce(-1, step, passed, "amax")
        step = step.gather(-1, step)
    real = passed[..., :-1].bool() & (cuts <= count - shortest)
    return cuts.where(real, count).sort(-1).values


def _divided(ends: Int[Tensor, "batch kv_heads pieces"], longest: int, entries: int) -> PerSegment:
    """Pieces in as few equal parts of at most `longest` entries as it takes."""
    begins = F.pad(ends[..., :-1], (1, 0))
    parts = (ends - begins + longest - 1) // longest
    after = parts.cumsum(-1)
    number = torch.arange(ends.shape[-1] + entries // longest, device=ends.device).expand(*ends.shape[:-1], -1)
    piece = torch.searchsorted(after, number.contiguous(), right=True).clamp(max=ends.shape[-1] - 1)
    begin, end, of = begins.gather(-1, piece), ends.gather(-1, piece), parts.gather(-1, piece)
    part = number - after.gather(-1, piece) + of + 1
    return (begin + part * (end - begin) // of.clamp(min=1)).minimum(end)


def _affordable(rest: Float[Tensor, "batch kv_heads 1"], mass: Weights, minimum: Weights, fixed: Weights) -> Weights:
    """The minima that `rest` pays for, beyond what is fixed, those of most mass first."""
    order = mass.argsort(dim=-1, descending=True, stable=True)
    price = (minimum - fixed).clamp(min=0).gather(-1, order)
    paid = (price.cumsum(-1) <= rest) | (price == 0)
    return minimum.where(torch.zeros_like(paid).scatter(-1, order, paid), 0.0)


def _level(
    total: Float[Tensor, "batch kv_heads 1"], mass: Weights, minimum: Weights, lower: Weights, upper: Weights
) -> Float[Tensor, "batch kv_heads 1"]:
    """The factor of the masses for which minimum + factor x mass, between its bounds, sums to `total`.

    The sum rises with the factor in straight pieces, whose ends are where a segment meets one of its bounds.
    """
    slope = mass.where(upper > lower, 0.0)
    unit = mass.clamp(min=1e-300)
    ends = torch.cat([(lower - minimum) / unit, (upper - minimum) / unit], -1)
    ends, order = ends.masked_fill(torch.cat([slope, slope], -1) == 0, 0.0).sort(-1)
    slopes = torch.cat([slope, -slope], -1).gather(-1, order).cumsum(-1)
    rises = slopes[..., :-1] * ends.diff(dim=-1)
    start = lower.sum(-1, keepdim=True)
    heights = torch.cat([start, start + rises.cumsum(-1)], -1)
    piece = (torch.searchsorted(heights, total, right=True) - 1).clamp(min=0)
    missing = total - heights.gather(-1, piece)
    further = (missing / slopes.gather(-1, piece)).nan_to_num(0.0, 0.0, 0.0)
    # Not beyond the piece's end, where rounding has left a slope that is none.
    end = ends.gather(-1, (piece + 1).clamp(max=ends.shape[-1] - 1))
    return (ends.gather(-1, piece) + further.clamp(min=0)).minimum(end)
