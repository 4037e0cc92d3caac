"""Cutting, dividing and choosing, each against the same in loops over plain numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from keepset.allocators.segments import cut_by_length, cut_by_mass, divide, sums, top_of_segments, trimmed
from tests.tiers import examples


def naive_cuts(mass: list[float], share: float, shortest: int, longest: int) -> list[int]:
    """Lengths of the segments of one head."""
    cuts, filled, threshold = [], 0.0, 1
    for place, part in enumerate(mass):
        filled += part
        crossed = False
        while threshold * share < 1 - 1e-9 and filled >= share * threshold:
            threshold += 1
            crossed = True
        if crossed:
            cuts.append(place + 1)
    lengths, begin = [], 0
    for cut in [*cuts, len(mass)]:
        if cut > begin:
            lengths.append(cut - begin)
            begin = cut
    merged: list[int] = []
    carried = 0
    for length in lengths:
        carried += length
        if carried >= shortest:
            merged.append(carried)
            carried = 0
    if carried:
        if merged:
            merged[-1] += carried
        else:
            merged.append(carried)
    divided = []
    for length in merged:
        parts = math.ceil(length / longest)
        ends = [part * length // parts for part in range(parts + 1)]
        divided += [stop - start for start, stop in pairwise(ends)]
    return divided


def lengths_of(segment: Tensor, valid: Tensor) -> list[int]:
    """Return the lengths of one head's segments in order; check that they are contiguous."""
    mine = segment[valid].tolist()
    assert mine == sorted(mine) and set(mine) == set(range(max(mine) + 1))
    return [mine.count(index) for index in range(max(mine) + 1)]


masses = st.one_of(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=90),
    st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=90),
    st.integers(1, 200).map(lambda n: [1.0] * n),
    st.integers(1, 200).map(lambda n: [0.0] * (n - 1) + [1.0]),
)


@examples(200)
@given(
    st.lists(masses, min_size=1, max_size=4),
    st.sampled_from([0.02, 0.1, 0.25, 0.3, 1.0]),
    st.integers(1, 12),
    st.integers(0, 20),
    st.booleans(),
)
@example([[1.0] * 100], 0.1, 10, 0, False)
@example([[1.0]], 0.1, 16, 16, False)
def test_cuts(heads: list[list[float]], share: float, shortest: int, more: int, in_front: bool) -> None:
    longest, entries = 2 * shortest + more, max(map(len, heads))
    mass, valid = torch.zeros(1, len(heads), entries), torch.zeros(1, len(heads), entries, dtype=torch.bool)
    for index, head in enumerate(heads):
        own = torch.tensor(head) + 1e-6
        place = slice(entries - len(head), entries) if in_front else slice(0, len(head))
        mass[0, index, place], valid[0, index, place] = own / own.sum(), True
    order = valid.cumsum(-1)
    ends = cut_by_mass(mass.double().cumsum(-1), order, share, shortest, longest)
    segment = torch.searchsorted(ends, order)
    for index in range(len(heads)):
        found = lengths_of(segment[0, index], valid[0, index])
        kept = mass[0, index][valid[0, index]].double().tolist()
        assert found == naive_cuts(kept, share, shortest, longest)
        assert ends[0, index].diff(prepend=torch.tensor([0])).tolist() == found + [0] * (ends.shape[-1] - len(found))
        masses = [part.sum().item() for part in mass[0, index][valid[0, index]].double().split(found)]
        assert sums(mass.double().cumsum(-1), order, ends)[0, index, : len(found)].tolist() == pytest.approx(masses)
        if sum(found) >= shortest:
            assert all(shortest <= length <= longest for length in found)


@examples(200)
@given(st.integers(1, 40), st.integers(1, 12))
def test_cuts_of_a_fixed_length(entries: int, length: int) -> None:
    valid = torch.ones(1, 1, entries, dtype=torch.bool)
    order = valid.cumsum(-1)
    ends = cut_by_length(order, length)
    found = lengths_of(torch.searchsorted(ends, order)[0, 0], valid[0, 0])
    assert ends[0, 0].diff(prepend=torch.tensor([0])).tolist() == found
    assert all(part == length for part in found[:-1]) and found[-1] <= length


@st.composite
def divisions(draw: st.DrawFn) -> tuple[int, list[float], list[int], list[int]]:
    """Quota, and of every segment mass, length and minimum."""
    segments = draw(st.integers(1, 12))
    each = [draw(st.integers(0, 30)) for _ in range(segments)]
    smallest = draw(st.integers(0, 4))
    mass = [draw(st.sampled_from([1e-14, 0.01, 0.2, 0.2, 1.0])) if length else 0.0 for length in each]
    quota = draw(st.integers(0, sum(each) + 3))
    return quota, mass, each, [min(smallest, length) for length in each]


def naive_shares(total: float, mass: list[float], upper: list[int], minimum: list[float]) -> list[float]:
    """Return the shares, by bisection for the factor."""

    def shares(factor: float) -> list[float]:
        return [min(least + factor * part, high) for least, part, high in zip(minimum, mass, upper, strict=True)]

    low, high = 0.0, 1e18
    for _ in range(400):
        near = high - low < 1 or (low > 0 and high / low < 2)
        middle = (low + high) / 2 if near else math.sqrt(max(low, 1e-9) * high)
        if sum(shares(middle)) < total:
            low = middle
        else:
            high = middle
    return shares(high)


@examples(200)
@given(divisions())
@example((5, [0.5, 0.5], [3, 3], [1, 1]))
@example((3, [1.0] * 8, [4] * 8, [1] * 8))
def test_division(case: tuple[int, list[float], list[int], list[int]]) -> None:
    quota, mass, length, minimum = case
    parts = [torch.tensor([[values]], dtype=torch.double) for values in (mass, length, minimum)]
    found = divide(torch.tensor([[quota]]), *parts)[0, 0].tolist()
    total = min(quota, sum(length))
    assert sum(found) == total
    # Minima are paid for in the order of the masses.
    rest, paid = total, [0.0] * len(mass)
    for index in sorted(range(len(mass)), key=lambda index: -mass[index]):
        rest -= minimum[index]
        if rest >= 0:
            paid[index] = minimum[index]
    shares = naive_shares(total, mass, length, paid)
    for count, share, low, high in zip(found, shares, paid, length, strict=True):
        assert low <= count <= high
        assert abs(count - share) < 1 + 1e-6
    if sum(minimum) <= total:
        assert all(count >= least for count, least in zip(found, minimum, strict=True))


def test_without_bounds_it_is_the_papers_formula() -> None:
    mass, length = [0.5, 0.3, 0.2], [100, 100, 100]
    parts = [torch.tensor([[values]], dtype=torch.double) for values in (mass, length, [2, 2, 2])]
    rest = 106 - 3 * 2
    assert divide(torch.tensor([[106]]), *parts)[0, 0].tolist() == [2 + round(rest * part) for part in mass]


@examples(200)
@given(
    st.integers(1, 3),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.data(),
)
def test_best_of_segments(heads: int, lengths: list[int], data: st.DataObject) -> None:
    entries = sum(lengths)
    scores = st.sampled_from([float("-inf"), -3e38, -1.5, -0.0, 0.0, 1e-45, 0.5, 0.5, 3e38])
    ranked = torch.tensor([[[data.draw(scores) for _ in range(entries)] for _ in range(heads)]])
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(1, heads, -1)
    quotas, held = [], []
    for head in range(heads):
        parts = (~ranked[0, head].isneginf()).split(lengths)
        have = [int(part.sum()) for part in parts]
        held.append(have)
        quotas.append([data.draw(st.integers(0, number)) for number in have])
    found = top_of_segments(ranked, segment, torch.tensor([held]).cumsum(-1), torch.tensor([quotas]))
    for head in range(heads):
        expected: set[int] = set()
        for index, quota in enumerate(quotas[head]):
            mine = [place for place in range(entries) if int(segment[0, head, place]) == index]
            mine.sort(key=lambda place: (-float(ranked[0, head, place]), -place))
            expected |= set(mine[:quota])
        assert set(found[0, head].nonzero()[:, 0].tolist()) == expected


@examples(200)
@given(st.integers(1, 12), st.integers(0, 4), st.data())
def test_what_is_too_much_goes_the_worst_first(entries: int, most: int, data: st.DataObject) -> None:
    scores = st.sampled_from([float("-inf"), -3e38, -1.5, -0.0, 0.0, 0.5, 0.5, 3e38])
    ranked = [data.draw(scores) for _ in range(entries)]
    chosen = [score > float("-inf") and data.draw(st.booleans()) for score in ranked]
    quota = max(0, sum(chosen) - data.draw(st.integers(0, most)))
    found = trimmed(torch.tensor([[ranked]]), torch.tensor([[chosen]]), torch.tensor([[quota]]), most)[0, 0]
    best = sorted((place for place in range(entries) if chosen[place]), key=lambda place: (-ranked[place], -place))
    assert found.nonzero()[:, 0].tolist() == sorted(best[:quota])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ranks_in_other_types(dtype: torch.dtype) -> None:
    ranked = torch.tensor([[[0.5, -2.0, 0.25, 7.0]]], dtype=dtype)
    found = top_of_segments(ranked, torch.tensor([[[0, 0, 1, 1]]]), torch.tensor([[[2, 4]]]), torch.tensor([[[1, 1]]]))
    assert found.tolist() == [[[True, False, False, True]]]


def test_many_entries_are_chosen_as_head_by_head() -> None:
    draw = torch.Generator().manual_seed(0)
    heads, entries, number = 8, 5000, 30
    assert heads * entries > 1 << 15 > entries  # sorted in another way together than alone
    ranked = torch.randn(2, heads // 2, entries, generator=draw).mul(4).round()  # with ties
    ranked[:, :, 100:140] = float("-inf")
    segment = torch.randint(number, ranked.shape, generator=draw).sort(-1).values
    length = torch.zeros(*segment.shape[:2], number, dtype=torch.long).scatter_add(
        -1, segment, (~ranked.isneginf()).long()
    )
    ends = length.cumsum(-1)
    quotas = (length * torch.rand(length.shape, generator=draw)).long()
    found = top_of_segments(ranked, segment, ends, quotas)
    assert torch.equal(found.sum(-1), quotas.sum(-1))
    for b in range(2):
        for h in range(heads // 2):
            one = (each[b : b + 1, h : h + 1] for each in (ranked, segment, ends, quotas))
            assert torch.equal(found[b : b + 1, h : h + 1], top_of_segments(*one))
