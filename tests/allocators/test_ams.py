"""AMS against its algorithm 1: cutting, dividing and choosing by themselves, then whole events, in loops."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from keepset import Budget, Observation, Recipe
from keepset.allocators.ams import AMS
from keepset.allocators.segments import cut_by_length, cut_by_mass, divide, sums, top_of_segments, trimmed
from keepset.methods.window import TOVA
from tests.methods.formulas import mean_window
from tests.methods.naive import EXACT, Given, Shape, every_shape, heads_of, kept, length_of, observe
from tests.methods.test_scorers import Spent
from tests.observations import changed
from tests.tiers import examples

# --- segments


def naive_cuts(mass: list[float], share: float, shortest: int, longest: int) -> list[int]:
    """Lengths of the segments of one head."""
    cuts, filled, threshold = [], 0.0, 1
    for index, part in enumerate(mass):
        filled += part
        while threshold * share < 1 - 1e-9 and filled >= share * threshold:
            threshold += 1
            cuts.append(index + 1)
    lengths = [stop - start for start, stop in pairwise(sorted({0, *cuts, len(mass)}))]
    merged: list[int] = []
    carried = 0
    for length in lengths:
        carried += length
        if carried >= shortest:
            merged.append(carried)
            carried = 0
    if carried:
        merged = [*merged[:-1], merged[-1] + carried] if merged else [carried]
    divided = []
    for length in merged:
        parts = math.ceil(length / longest)
        ends = [part * length // parts for part in range(parts + 1)]
        divided += [stop - start for start, stop in pairwise(ends)]
    return divided


def lengths_of(segment: Tensor, valid: Tensor) -> list[int]:
    """Return the lengths of one head's segments in order; check that they are contiguous."""
    numbers = segment[valid].tolist()
    assert numbers == sorted(numbers) and set(numbers) == set(range(max(numbers) + 1))
    return [numbers.count(index) for index in range(max(numbers) + 1)]


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
def test_cuts(heads: list[list[float]], share: float, shortest: int, extra: int, in_front: bool) -> None:
    longest, entries = 2 * shortest + extra, max(map(len, heads))
    mass, valid = torch.zeros(1, len(heads), entries), torch.zeros(1, len(heads), entries, dtype=torch.bool)
    for index, head in enumerate(heads):
        head_mass = torch.tensor(head) + 1e-6
        part = slice(entries - len(head), entries) if in_front else slice(0, len(head))
        mass[0, index, part], valid[0, index, part] = head_mass / head_mass.sum(), True
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
    lengths = [draw(st.integers(0, 30)) for _ in range(segments)]
    smallest = draw(st.integers(0, 4))
    mass = [draw(st.sampled_from([1e-14, 0.01, 0.2, 0.2, 1.0])) if length else 0.0 for length in lengths]
    quota = draw(st.integers(0, sum(lengths) + 3))
    return quota, mass, lengths, [min(smallest, length) for length in lengths]


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
    remaining, paid = total, [0.0] * len(mass)
    for index in sorted(range(len(mass)), key=lambda index: -mass[index]):
        remaining -= minimum[index]
        if remaining >= 0:
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
    remaining = 106 - 3 * 2
    assert divide(torch.tensor([[106]]), *parts)[0, 0].tolist() == [2 + round(remaining * part) for part in mass]


@examples(200)
@given(st.integers(1, 3), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_best_of_segments(heads: int, lengths: list[int], data: st.DataObject) -> None:
    entries = sum(lengths)
    scores = st.sampled_from([float("-inf"), -3e38, -1.5, -0.0, 0.0, 1e-45, 0.5, 0.5, 3e38])
    ranked = torch.tensor([[[data.draw(scores) for _ in range(entries)] for _ in range(heads)]])
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(1, heads, -1)
    quotas, entry_counts = [], []
    for head in range(heads):
        parts = (~ranked[0, head].isneginf()).split(lengths)
        have = [int(part.sum()) for part in parts]
        entry_counts.append(have)
        quotas.append([data.draw(st.integers(0, number)) for number in have])
    found = top_of_segments(ranked, segment, torch.tensor([entry_counts]).cumsum(-1), torch.tensor([quotas]))
    for head in range(heads):
        expected: set[int] = set()
        for index, quota in enumerate(quotas[head]):
            indices = [entry for entry in range(entries) if int(segment[0, head, entry]) == index]
            indices.sort(key=lambda entry: (-float(ranked[0, head, entry]), -entry))
            expected |= set(indices[:quota])
        assert set(found[0, head].nonzero()[:, 0].tolist()) == expected


@examples(200)
@given(st.integers(1, 12), st.integers(0, 4), st.data())
def test_what_is_too_much_goes_the_worst_first(entries: int, most: int, data: st.DataObject) -> None:
    scores = st.sampled_from([float("-inf"), -3e38, -1.5, -0.0, 0.0, 0.5, 0.5, 3e38])
    ranked = [data.draw(scores) for _ in range(entries)]
    chosen = [score > float("-inf") and data.draw(st.booleans()) for score in ranked]
    quota = max(0, sum(chosen) - data.draw(st.integers(0, most)))
    found = trimmed(torch.tensor([[ranked]]), torch.tensor([[chosen]]), torch.tensor([[quota]]), most)[0, 0]
    best = sorted((index for index in range(entries) if chosen[index]), key=lambda index: (-ranked[index], -index))
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
    ranked = torch.randn(1, heads, entries, generator=draw).mul(4).round()  # with ties
    ranked[:, :, 100:140] = float("-inf")
    segment = torch.randint(number, ranked.shape, generator=draw).sort(-1).values
    length = torch.zeros(1, heads, number, dtype=torch.long).scatter_add(-1, segment, (~ranked.isneginf()).long())
    quotas = (length * torch.rand(length.shape, generator=draw)).long()
    arguments = ranked, segment, length.cumsum(-1), quotas
    found = top_of_segments(*arguments)
    assert torch.equal(found.sum(-1), quotas.sum(-1))
    for head in range(heads):
        assert torch.equal(found[:, [head]], top_of_segments(*(argument[:, [head]] for argument in arguments)))


# --- events

SMALL: dict[str, Any] = dict(window=4, kernel=3, segment_mass=0.15, min_segment=2, max_segment=6)


def naive_mass(observation: Observation, method: AMS, request: int, head: int) -> list[float]:
    """Equation 1 over a request's own entries."""
    entries, newest = length_of(observation, request), int(observation.lengths[request])
    usage = mean_window(observation, request, range(head, head + 1), method.window)
    # Of the window's queries so many came before the entry.
    positions = observation.positions[request, head].tolist()
    missed = [max(method.window - (newest - positions[index]), 0) for index in range(entries)]
    best = max((value for value, number in zip(usage, missed, strict=True) if number), default=0.0)
    full = [value + best * number / method.window for value, number in zip(usage, missed, strict=True)]
    if method.padding == "positions":
        full = [max(usage) if positions[index] >= newest - method.window else usage[index] for index in range(entries)]
    half = method.kernel // 2
    padded = [sum(full[max(index - half, 0) : index + half + 1]) / method.kernel for index in range(entries)]
    total = sum(max(value, 0.0) + 1e-12 for value in padded)
    return [(max(value, 0.0) + 1e-12) / total for value in padded]


def naive_choice(
    mass: list[float], scores: list[float], positions: list[int], newest: int, keep: int, budget: Budget, method: AMS
) -> tuple[list[int], list[int], list[float]]:
    """Algorithm 1 from line 13 on: places that stay, the segments' lengths and the shares that they may claim."""
    entries = len(mass)
    lengths = naive_cuts(mass, method.segment_mass, method.min_segment, method.max_segment)
    segment = [index for index, length in enumerate(lengths) for _ in range(length)]
    weight = [sum(m for m, s in zip(mass, segment, strict=True) if s == index) for index in range(len(lengths))]
    least, remaining = [0] * len(lengths), keep
    for index in sorted(range(len(lengths)), key=lambda index: -weight[index]):
        remaining -= min(method.min_quota, lengths[index])
        if remaining < 0:
            break
        least[index] = min(method.min_quota, lengths[index])
    shares = naive_shares(keep, weight, lengths, [float(low) for low in least])
    quotas = [math.floor(share + 1e-9) for share in shares]
    for index in sorted(range(len(lengths)), key=lambda index: quotas[index] - shares[index]):
        if sum(quotas) < keep:
            quotas[index] += 1
    # Lines 34 to 36: by score alone.
    chosen: set[int] = set()
    for index, quota in enumerate(quotas):
        indices = [entry for entry in range(entries) if segment[entry] == index]
        chosen |= set(sorted(indices, key=lambda entry: (scores[entry], entry), reverse=True)[:quota])
    # Line 31: when feasible.
    must = [entry for entry in range(entries) if positions[entry] < budget.sinks][:keep]
    room = min(keep - len(must), budget.recent)
    must += [entry for entry in range(entries) if positions[entry] >= newest - room and entry not in must]
    # Lines 38 to 41.
    candidates = sorted(chosen - set(must), key=lambda entry: (scores[entry], entry), reverse=True)
    stays = must + candidates[: keep - len(must)]
    left = sorted(set(range(entries)) - set(stays), key=lambda entry: (scores[entry], entry), reverse=True)
    return sorted(stays + left[: keep - len(stays)]), lengths, shares


@every_shape
@pytest.mark.parametrize("padding", ["observations", "positions"])
def test_mass(shape: Shape, padding: str) -> None:
    observation, method = observe(shape), AMS(TOVA(), credit=False, padding=padding, **SMALL)
    mass = method.segments(observation, Budget(4)).mass
    for request in range(shape.batch):
        entries = length_of(observation, request)
        assert not mass[request, :, entries:].any()
        expected = [naive_mass(observation, method, request, head) for head in range(shape.kv_heads)]
        torch.testing.assert_close(mass[request, :, :entries], torch.tensor(expected), **EXACT)


def test_credit_lives_with_its_entries() -> None:
    shape, method, budget = Shape((14, 9), 2, 3, 4, 4), AMS(TOVA(), decay=0.7, mix=0.6, **SMALL), Budget(6, 1, 2)
    observation = observe(shape)
    keep = Recipe(method, budget).select(observation)
    credit = keep.layer(0).state["credit"]
    assert not observation.state
    # The next event: what stayed has its credit, three new entries have none.
    order, old = torch.zeros(2, 2, 9, dtype=torch.long), torch.zeros(2, 2, 9)
    for request, length in enumerate(shape.lengths):
        for head in range(2):
            first = torch.tensor(naive_mass(observation, method, request, head))
            torch.testing.assert_close(credit[request, head, :length], 0.3 * first, **EXACT)
            stayed = kept(keep, observation, request, head)
            order[request, head] = torch.tensor([*stayed, *range(length, length + 3)])
            old[request, head, :6] = credit[request, head, stayed]
    valid = torch.ones(2, 2, 9, dtype=torch.bool)
    later = observe(Shape((9, 9), 2, 3, 4, 4), seed=5, positions=order, valid=valid, state={"credit": old.clone()})
    looked = method.segments(later, budget).mass
    after = Recipe(method, budget).select(later).layer(0).state["credit"]
    assert torch.equal(later.state["credit"], old)
    for request in range(2):
        for head in range(2):
            now = torch.tensor(naive_mass(later, method, request, head))
            new = 0.7 * old[request, head] + 0.3 * now
            torch.testing.assert_close(after[request, head], new, **EXACT)
            torch.testing.assert_close(looked[request, head], 0.6 * now + 0.4 * new / new.sum(), **EXACT)


def test_what_is_useful_at_one_event_after_another_gains() -> None:
    """Section 3.3: after two events of the same mass an old entry's credit is to a new one's as 1 + decay to 1."""
    shape = Shape((12,), 1, 1, 4, 4)
    method = AMS(TOVA(), decay=0.9, **SMALL)
    observation = observe(shape)
    budget = Budget(8, sinks=1, recent=1)
    first = Recipe(method, budget).select(observation).layer(0).state["credit"]
    old = first.clone()
    old[..., 6:] = 0.0  # as if these were new at the second event
    again = Recipe(method, budget).select(changed(observation, state={"credit": old})).layer(0).state["credit"]
    ratio = again / (0.1 * method.segments(changed(observation, state={}), budget).mass)
    torch.testing.assert_close(ratio[0, 0, :6], torch.full((6,), 1.9), **EXACT)
    torch.testing.assert_close(ratio[0, 0, 6:], torch.ones(6), **EXACT)


def test_where_all_may_stay_there_was_no_event() -> None:
    observation = observe(Shape((12, 5), 2, 2, 4, 4))
    credit = Recipe(AMS(TOVA(), **SMALL), Budget(5, sinks=1, recent=1)).select(observation).layer(0).state["credit"]
    assert credit[0].all() and not credit[1].any()


@examples(150)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    keep=st.integers(1, 50),
    always=st.tuples(st.integers(0, 4), st.integers(0, 8)),
    least=st.integers(0, 3),
    seed=st.integers(0, 1000),
    spoilt=st.sampled_from(["", "nan", "zero", "ties"]),
)
def test_a_whole_event(
    lengths: list[int], keep: int, always: tuple[int, int], least: int, seed: int, spoilt: str
) -> None:
    shape = Shape(tuple(lengths), 2, 2, 4, 4)
    observation = observe(shape, seed=seed)
    scores = torch.randn(observation.valid.shape, generator=torch.Generator().manual_seed(seed))
    if spoilt == "ties":
        scores = scores.round()
    if spoilt == "zero":
        observation.keys.zero_()
    if spoilt == "nan":
        observation.keys[:, 0, 0] = math.nan
    observation = changed(observation, state={"scores": scores})
    method = AMS(Given(), credit=False, min_quota=least, **SMALL)
    keep = max(keep, sum(always))
    budget = Budget(keep, *always)
    found = Recipe(method, budget).select(observation)
    parts = method.segments(observation, budget)
    for request, entries in enumerate(lengths):
        for head in range(2):
            stayed = kept(found, observation, request, head)
            assert len(stayed) == min(keep, entries)
            assert set(range(min(always[0], entries))) <= set(stayed)
            mass = parts.mass[request, head, :entries].double().tolist()
            of_head = scores[request, head, :entries].tolist()
            expected, sizes, shares = naive_choice(
                mass, of_head, list(range(entries)), entries, min(keep, entries), budget, method
            )
            segment = parts.segment[request, head]
            assert lengths_of(segment, observation.valid[request, head]) == sizes
            quotas = parts.quotas[request, head, : len(sizes)].tolist()
            assert sum(quotas) == min(keep, entries)
            if sum(min(least, size) for size in sizes) <= min(keep, entries):
                assert all(quota >= min(least, size) for quota, size in zip(quotas, sizes, strict=True))
            assert all(abs(quota - share) < 1 + 1e-6 for quota, share in zip(quotas, shares, strict=True))
            remainders = sorted((share - math.floor(share + 1e-9)) for share in shares)
            if all(later - sooner > 1e-6 for sooner, later in pairwise(remainders)):
                assert stayed == expected


def test_switches() -> None:
    """Each of table 7's variants is what it says."""
    observation, budget = observe(Shape((300,), 2, 2, 8, 8)), Budget(40, sinks=4, recent=8)
    scorer = TOVA()
    whole = AMS(scorer, window=8)
    assert heads_of(AMS(scorer, segmented=False), observation, budget) == heads_of(scorer, observation, budget)
    fixed = AMS(scorer, window=8, adaptive=False).segments(observation, budget)
    assert fixed.segment[0, 0].tolist() == [place // 128 for place in range(300)]
    by_length = AMS(scorer, window=8, weighted=False).segments(observation, budget)
    assert torch.equal(by_length.segment, whole.segments(observation, budget).segment)
    sizes = [int((by_length.segment[0, 0] == index).sum()) for index in range(by_length.quotas.shape[-1])]
    spread = [(q - 1) / size for q, size in zip(by_length.quotas[0, 0].tolist(), sizes, strict=True) if size]
    assert max(spread) - min(spread) < 2 / min(size for size in sizes if size)
    keep_set = Recipe(AMS(scorer, window=8, credit=False), budget).select(observation)
    assert "credit" not in keep_set.layer(0).state
    assert AMS(scorer, weighted=False, adaptive=False).traits.needs.window == 1


def test_an_event_does_not_wait_for_a_device_nor_loop_over_heads() -> None:
    """Many heads and segments take the same operations as one, and none of these looks at a value."""
    method, launches = AMS(TOVA(), window=8), []
    for heads, batch in ((1, 1), (8, 1), (2, 5)):
        observation = observe(Shape((300,) * batch, heads, 2, 8, 8))
        mass, _ = method._mass(observation)
        quotas = method.quotas(observation.sizes, Budget(100, sinks=4, recent=16))
        ranked = torch.randn(observation.valid.shape)
        with Spent() as spent:
            segment, ends, parts = method._divided(observation, mass, quotas)
            trimmed(ranked, top_of_segments(ranked, segment, ends, parts), quotas, 20)
        del spent.launches["aten.clone.default"]  # whether a tensor is contiguous already depends on its sizes
        launches.append(spent.launches)
    assert launches[0] == launches[1] == launches[2]
    waits = ("_local_scalar_dense", "nonzero", "_to_copy.cpu", "is_nonzero", "masked_select", "unique")
    assert not [name for name in launches[0] if any(wait in name for wait in waits)]
