"""Segments of a text: where to cut it by mass, and how to divide a head's quota among the pieces.

Every function works on all requests and KV heads at once: it neither loops over heads or segments nor waits for a
device.
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
"""From this many whole numbers on, torch sorts one row by radix on a CPU; fewer sort faster as several rows."""


def cut_by_mass(filled: Scores, order: PerEntry, share: float, shortest: int, longest: int) -> PerSegment:
    """Return where segments of about equal mass end, as the number of entries up to there.

    A head is cut wherever another `share` of its mass is full, after the entry that fills it (AMS, section 3.3 and
    algorithm 1, lines 13 to 23). Then a segment shorter than `shortest` is joined with the next one, the last with the
    one before. A segment longer than `longest` is divided into as few equal parts as possible. If `longest` is at least
    twice `shortest`, all segments of texts longer than `shortest` are within these lengths.

    Args:
        filled: the mass up to and including every entry, in double.
        order: the number of entries up to and including every entry.
        share: the mass of a segment, as a part of the head's mass.
        shortest: the fewest entries of a segment.
        longest: the most entries of a segment.

    Returns:
        An end for as many segments as any head may have; segments that a head lacks end where its last one does.
    """
    count = order[..., -1:]
    thresholds = share * torch.arange(1, ceil(1 / share - 1e-9), device=filled.device, dtype=torch.double)
    entry = torch.searchsorted(filled, thresholds.expand(*filled.shape[:-1], -1).contiguous())
    cuts = order.gather(-1, entry.clamp(max=filled.shape[-1] - 1))
    return _divided(torch.cat([_far_enough(cuts, count, shortest), count], -1), longest, filled.shape[-1])


def cut_by_length(order: PerEntry, length: int) -> PerSegment:
    """Return where segments of a fixed length end, as the number of entries up to there.

    Args:
        order: as for `cut_by_mass`.
        length: entries of a segment.
    """
    ends = length * torch.arange(1, -(-order.shape[-1] // length) + 1, device=order.device)
    return order[..., -1:].minimum(ends)


def sums(filled: Scores, order: PerEntry, ends: PerSegment) -> Weights:
    """Return the mass of every segment.

    Args:
        filled, order: as for `cut_by_mass`.
        ends: the number of entries up to each segment's end.
    """
    last = torch.searchsorted(order, ends)
    return filled.gather(-1, last).diff(dim=-1, prepend=torch.zeros_like(filled[..., :1]))


def divide(quotas: Quotas, mass: Weights, length: Weights, minimum: Weights) -> PerSegment:
    """Return how many entries every segment keeps; they sum to `quotas` exactly.

    Every segment gets its minimum, and a part of the rest in proportion to its mass, but no more than its length (AMS,
    section 3.3 and algorithm 1, lines 24 to 29). What does not fit a segment goes to the others in the same proportion.
    The shares are rounded to whole numbers. If not even the minima fit, the segments of least mass go without.

    Args:
        mass: the mass of every segment.
        length: entries of every segment.
        minimum: the fewest entries that every segment keeps.
    """
    total = quotas.double().minimum(length.sum(-1))[..., None]
    minimum = _affordable(total, mass, minimum)
    shares = (minimum + _level(total, mass, minimum, length) * mass).clamp(max=length)
    return round_to_total(shares, total[..., 0].long())


def top_of_segments(ranked: Scores, segment: PerEntry, ends: PerSegment, quotas: PerSegment) -> Mask:
    """Return which entries are the best of their segment, never holes; among equal ones the later win.

    This is one sort of whole numbers that are in the order of (segment, score): floating-point numbers of one sign are
    in the order of their bits.

    Args:
        ranked: scores; -inf at holes.
        segment: the segment of every entry.
        ends: where segments end, as the number of entries up to there.
        quotas: how many entries every segment keeps.
    """
    segments = segment.where(ranked > float("-inf"), quotas.shape[-1])  # holes behind all segments
    keys, worst_first = _sorted_rows((segments << 32) + _rising(ranked), (quotas.shape[-1] + 1) << 32)
    begins = F.pad(ends - quotas, (0, 1), value=ranked.shape[-1])
    chosen = torch.arange(ranked.shape[-1], device=ranked.device) >= begins.gather(-1, (keys + (1 << 31)) >> 32)
    return torch.zeros_like(chosen).scatter(-1, worst_first, chosen)


def trimmed(ranked: Scores, chosen: Mask, quotas: Quotas, most: int) -> Mask:
    """Return the best of the chosen entries; among equal ones the later win.

    AMS, algorithm 1, line 40. There is never anything to fill up (line 41): the segments' quotas sum to the head's.

    Args:
        ranked: scores, with what always stays above the rest.
        chosen: entries to choose from.
        quotas: how many of them stay in each head.
        most: the most entries by which a head may exceed its quota.
    """
    entries = ranked.shape[-1]
    index = torch.arange(entries, device=ranked.device)
    order = ((_rising(ranked) << 32) + index).where(chosen, torch.iinfo(torch.long).max)
    number = min(most, entries)
    worst = order.topk(number, dim=-1, largest=False).indices
    excess = chosen.sum(-1, keepdim=True) - quotas[..., None]
    return chosen.scatter(-1, worst, chosen.gather(-1, worst) & (index[:number] >= excess))


def _rising(ranked: Scores) -> PerEntry:
    """Return whole numbers of 32 bits in the order of these floating-point numbers."""
    bits = (ranked.float() + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _sorted_rows(keys: PerEntry, span: int) -> tuple[PerEntry, PerEntry]:
    if keys.numel() < _BY_RADIX:
        return torch.sort(keys, dim=-1, stable=True)
    row = torch.arange(keys[..., 0].numel(), device=keys.device).view(*keys.shape[:2], 1)
    rising, order = torch.sort((keys + row * span).flatten(), stable=True)
    return rising.view_as(keys) - row * span, order.view_as(keys) - row * keys.shape[-1]


def _far_enough(
    cuts: Int[Tensor, "batch kv_heads cuts"], count: Int[Tensor, "batch kv_heads 1"], shortest: int
) -> Int[Tensor, "batch kv_heads cuts"]:
    """Return the first cuts that are at least `shortest` entries apart; the others become `count`.

    From every cut there is one next cut that is far enough. Doubling the steps finds which cuts the path from the
    beginning passes.

    Args:
        cuts: numbers of entries in rising order.
        count: entries of each head.
        shortest: the least entries between cuts.
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
    """Return where pieces end once each is divided into as few equal parts of at most `longest` as possible.

    Args:
        ends: where pieces end.
        longest: the most entries of a part.
        entries: entries of the longest head.
    """
    begins = F.pad(ends[..., :-1], (1, 0))
    parts = (ends - begins + longest - 1) // longest
    after = parts.cumsum(-1)
    number = torch.arange(ends.shape[-1] + entries // longest, device=ends.device).expand(*ends.shape[:-1], -1)
    piece = torch.searchsorted(after, number.contiguous(), right=True).clamp(max=ends.shape[-1] - 1)
    begin, end, of = begins.gather(-1, piece), ends.gather(-1, piece), parts.gather(-1, piece)
    part = number - after.gather(-1, piece) + of + 1
    return (begin + part * (end - begin) // of.clamp(min=1)).minimum(end)


def _affordable(total: Float[Tensor, "batch kv_heads 1"], mass: Weights, minimum: Weights) -> Weights:
    """Return the minima that `total` pays for, those of most mass first.

    Args:
        total: the budget of each head.
        mass: of each segment.
        minimum: the least entries of each segment.
    """
    order = mass.argsort(dim=-1, descending=True, stable=True)
    paid = minimum.gather(-1, order).cumsum(-1) <= total
    return minimum.where(torch.zeros_like(paid).scatter(-1, order, paid), 0.0)


def _level(
    total: Float[Tensor, "batch kv_heads 1"], mass: Weights, minimum: Weights, length: Weights
) -> Float[Tensor, "batch kv_heads 1"]:
    """Return the factor for which minimum + factor x mass, limited to the length, sums to `total`.

    Segments fill up one after another as the factor rises. Between two of these points the sum is a straight line.

    Args:
        total: the budget of each head.
        mass: of each segment.
        minimum, length: the least and the most entries of each segment.
    """
    room = length - minimum
    full, order = (room / mass.clamp(min=1e-300)).sort(-1)
    room, mass = room.gather(-1, order), mass.gather(-1, order)
    slope = mass.flip(-1).cumsum(-1).flip(-1)  # of this segment and those that are full later
    taken = room.cumsum(-1) - room  # by those that are full sooner
    remaining = total - minimum.sum(-1, keepdim=True)
    line = torch.searchsorted(taken + full * slope, remaining).clamp(max=full.shape[-1] - 1)
    factor = (remaining - taken.gather(-1, line)) / slope.gather(-1, line)
    return factor.nan_to_num(0.0).clamp(min=0).minimum(full.gather(-1, line))
