"""Allocators a second time, in loops over plain numbers: which entries each keeps of one request.

A formula is given `scores[layer][head][entry]`, and returns the entries that stay, `[layer][head]`. It is registered
with the allocators that it is checked for; `test_formulas.py` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from hypothesis import strategies as st

from keepset import Budget, Method, Observation
from keepset.allocators.heads import AdaKV, ChunkKV, Uniform
from keepset.allocators.pool import Composite, Pool
from tests.methods.naive import Given, Shape, observe

Scores = list[list[list[float]]]
Sets = list[list[list[int]]]
Formula = Callable[[Scores, Budget, Any], Sets]

FORMULAS: list[tuple[Method, Formula]] = []
"""Allocators, and the formula of each."""


def formula(*allocators: Method) -> Callable[[Formula], Formula]:
    """Register a formula for allocators of one kind with different parameters."""

    def register(sets: Formula) -> Formula:
        FORMULAS.extend((allocator, sets) for allocator in allocators)
        return sets

    return register


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    sinks, recent = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    number = st.integers(max(1, sinks + recent), 20)
    return Budget(draw(number | st.integers(1, 100).map(lambda percent: percent / 100)), sinks, recent)


def given_scores(*layers: Sequence[Sequence[float]]) -> list[Observation]:
    """Return one observation per layer, of one request, whose entries have these scores, `[head][entry]`."""
    return [
        observe(
            Shape((len(layer[0]),), len(layer), 2, 3, 3),
            layer=index,
            layers=range(len(layers)),
            state={"scores": torch.tensor([layer])},
        )
        for index, layer in enumerate(layers)
    ]


def rounded(shares: Sequence[Fraction], total: int) -> list[int]:
    """Return whole numbers that sum to the total: largest remainders are rounded up, of equal ones the earlier."""
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda part: (counts[part] - shares[part], part))
    for part in by_remainder[: total - sum(counts)]:
        counts[part] += 1
    return counts


def key(scores: Sequence[float], entry: int, budget: Budget) -> tuple[int, float, int]:
    """Return the order of entries: sinks, the first one best; the recent suffix; scores, of equal ones the later."""
    if entry < budget.sinks:
        return 2, -entry, entry
    return (1, 0.0, entry) if entry >= len(scores) - budget.recent else (0, scores[entry], entry)


def best_first(scores: Sequence[float], budget: Budget) -> list[int]:
    return sorted(range(len(scores)), key=lambda entry: key(scores, entry, budget), reverse=True)


def always(budget: Budget, length: int) -> int:
    """Return how many entries stay in any case."""
    return min(max(1, budget.sinks + budget.recent), length)


def quota(budget: Budget, length: int, parts: int = 1) -> int:
    """Return the entries that equally long parts keep together; a fraction is taken of all of them at once."""
    keep = budget.keep
    assert keep is not None
    if isinstance(keep, int):
        return parts * min(keep, length)
    return max(parts * length * round(keep * 100) // 100, parts * always(budget, length))


@formula(Uniform(Given()))
def uniform(scores: Scores, budget: Budget, method: Uniform) -> Sets:
    number = quota(budget, len(scores[0][0]))
    return [[sorted(best_first(head, budget)[:number]) for head in layer] for layer in scores]


# Quarters are exact in binary: shares with equal remainders are equal for both.
@formula(*(AdaKV(Given(), floor=quarters / 4) for quarters in range(5)))
def adakv(scores: Scores, budget: Budget, method: AdaKV) -> Sets:
    """The best entries of all heads are counted, mixed with the uniform share, and rounded to the total."""
    number, sets = quota(budget, len(scores[0][0])), []
    for layer in scores:
        pool = sorted(
            ((*key(head, entry, budget), index) for index, head in enumerate(layer) for entry in range(len(head))),
            reverse=True,
        )
        best = [index for *_, index in pool[: len(layer) * number]]
        floor = Fraction(method.floor)
        shares = [(1 - floor) * best.count(index) + floor * number for index in range(len(layer))]
        counts = rounded(shares, len(layer) * number)
        sets.append([sorted(best_first(h, budget)[:count]) for h, count in zip(layer, counts, strict=True)])
    return sets


@formula(*(AdaKV(Given(), floor=quarters / 4, safeguard="least") for quarters in range(5)))
def adakv_with_minima(scores: Scores, budget: Budget, method: AdaKV) -> Sets:
    """Each head's best are taken first; then the best of all others, whosever they are (kvpress)."""
    number, sets = quota(budget, len(scores[0][0])), []
    for layer in scores:
        least = min(max(1, int(method.floor * number)), number) if method.floor else 0
        kept = [best_first(head, budget)[:least] for head in layer]
        candidates = sorted(
            (
                (*key(head, entry, budget), index)
                for index, head in enumerate(layer)
                for entry in range(len(head))
                if entry not in kept[index]
            ),
            reverse=True,
        )
        for *_, entry, index in candidates[: len(layer) * (number - least)]:
            kept[index].append(entry)
        sets.append([sorted(head) for head in kept])
    return sets


@formula(*(ChunkKV(Given(), chunk=chunk) for chunk in (1, 2, 3, 7)))
def chunkkv(scores: Scores, budget: Budget, method: ChunkKV) -> Sets:
    """Chunks best first, the last one filled with its best."""
    return [[_chunks(layer, head, budget, method.chunk) for head in range(len(layer))] for layer in scores]


def _chunks(heads: list[list[float]], head: int, budget: Budget, chunk: int) -> list[int]:
    """Entries of one head; all heads together say which chunk is the better."""
    scores, length = heads[head], len(heads[head])
    number = quota(budget, length)
    chosen = best_first(scores, budget)[: min(budget.sinks + budget.recent, length)]
    always_stay, chunks = set(chosen), []
    for start in range(0, length, chunk):
        compared = [entry for entry in range(start, min(start + chunk, length)) if entry not in always_stay]
        if compared:
            mean = sum(sum(head_scores[entry] for entry in compared) for head_scores in heads) / len(heads)
            chunks.append((mean / len(compared), start, compared))
    for _, _, compared in sorted(chunks, reverse=True):
        best = sorted(compared, key=lambda entry: (scores[entry], entry), reverse=True)
        chosen += best[: max(0, number - len(chosen))]
    return sorted(chosen[:number])


@formula(*(Composite(Given(), how, floor) for how in ("max", "mean") for floor in (0.0, 0.25, 1.0)))
def composite(scores: Scores, budget: Budget, method: Composite) -> Sets:
    """KVCompose's equations 17 to 24: entries of one rank make a token; the best tokens say what each layer keeps."""
    layers, length = len(scores), len(scores[0][0])
    total = quota(budget, length, layers)
    certain = min(always(budget, length), total // layers)
    order = [[best_first(head, budget) for head in layer] for layer in scores]
    remaining = total - certain * layers
    least = min(int(method.floor * remaining / layers), length - certain)
    tokens = []
    for layer in range(layers):
        for rank in range(certain + least, length):
            worth = [head[ranking[rank]] for head, ranking in zip(scores[layer], order[layer], strict=True)]
            value = max(worth) if method.aggregate_head == "max" else sum(worth) / len(worth)
            tokens.append((value, -rank, layer))
    counts = [certain + least] * layers
    for _, _, layer in sorted(tokens, reverse=True)[: remaining - least * layers]:
        counts[layer] += 1
    return [[sorted(head[: counts[layer]]) for head in order[layer]] for layer in range(layers)]


def evened(scores: Scores, counts: list[int], least: list[int], order: list[list[int]], groups: int) -> list[int]:
    """The counts of heads if the layers of a group keep as many as one another, the first ones one more."""
    layers, heads = len(scores), len(scores[0])
    groups = min(groups, layers)
    new = list(least)
    for group in range(groups):
        members = [layer for layer in range(layers) if layer * groups // layers == group]
        total = sum(counts[layer * heads + head] for layer in members for head in range(heads))
        for place, layer in enumerate(members):
            parts = range(layer * heads, (layer + 1) * heads)
            share = total // len(members) + (place < total % len(members)) - sum(least[part] for part in parts)
            values = dict(zip(parts, scores[layer], strict=True))
            candidates = [(values[part][e], -e, part) for part in parts for e in order[part][least[part] :]]
            for _, _, part in sorted(candidates, reverse=True)[: max(share, 0)]:
                new[part] += 1
    return new


@formula(*(Pool(Given(), floor=floor, groups=groups) for floor in (0.0, 0.25, 1.0) for groups in (0, 1, 2, 3)))
def pool(scores: Scores, budget: Budget, method: Pool) -> Sets:
    """The best entries of all heads of all layers, some of each in any case; of equal ones the earlier entry."""
    parts = [head for layer in scores for head in layer]
    length = len(parts[0])
    total = quota(budget, length, len(parts))
    least = min(max(always(budget, length), int(method.floor * total / len(parts))), length)
    order = [best_first(head, budget) for head in parts]
    candidates = [(head[e], -e, part) for part, head in enumerate(parts) for e in order[part][least:]]
    counts = [least] * len(parts)
    for _, _, part in sorted(candidates, reverse=True)[: total - least * len(parts)]:
        counts[part] += 1
    if method.groups:
        counts = evened(scores, counts, [least] * len(parts), order, method.groups)
    sets = [sorted(ranking[:count]) for ranking, count in zip(order, counts, strict=True)]
    return [sets[first : first + len(scores[0])] for first in range(0, len(sets), len(scores[0]))]
