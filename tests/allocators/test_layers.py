"""Budgets that are divided among layers: dividing and pooling in loops, and the allocators that do so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keepset import Budget, Method, Observation
from keepset.allocators.heads import AdaKV, CriticalKV
from keepset.allocators.layers import Dynamic, LayerAllocator, Pyramid, ZigZag, divide, pooled_counts, total_entries
from keepset.kernels.softmax import Softmax
from keepset.methods.keys import Knorm
from keepset.methods.window import SnapKV
from tests.allocators.formulas import Scores, given_scores, rounded
from tests.methods.formulas import mean_window
from tests.methods.naive import DTYPES, Given, Shape, heads_of, observe, sets_of
from tests.tiers import examples

every_kind = pytest.mark.parametrize("kind", [ZigZag, Dynamic])


def model(shape: Shape, layers: int) -> list[Observation]:
    return [observe(shape, seed=layer, layer=layer, layers=range(layers)) for layer in range(layers)]


def holding(counts: Sequence[int], length: int, seed: int = 0) -> list[Observation]:
    """Layers that hold so many of the newest entries of a text after an event."""
    return [
        observe(
            Shape((count,), 2, 2, 3, 3),
            layer=layer,
            layers=range(len(counts)),
            seed=seed + layer,
            positions=torch.arange(length - count, length).expand(1, 2, count),
            state={"scores": torch.randn(1, 2, count, generator=torch.Generator().manual_seed(seed + layer))},
        )
        for layer, count in enumerate(counts)
    ]


def counts(method: Method, observations: Sequence[Observation], budget: Budget, request: int = 0) -> list[int]:
    """Return what every layer keeps, the same in each of its heads."""
    per_layer = method.select_all(observations, budget).counts[:, request].tolist()
    assert all(len(set(heads)) == 1 for heads in per_layer)
    return [heads[0] for heads in per_layer]


# --- dividing and pooling


def level(shares: list[int], total: int, room: list[int]) -> list[Fraction]:
    """Divide in proportion to shares; a full part leaves the rest to the others, round after round."""
    shares_given = [Fraction(0)] * len(shares)
    open_ = {part for part, share in enumerate(shares) if share and room[part]}
    left = Fraction(min(total, sum(room[part] for part in open_)))
    while open_ and left:
        pace = left / sum(shares[part] for part in open_)
        full = {part for part in open_ if shares[part] * pace >= room[part]}
        for part in full or open_:
            shares_given[part] = Fraction(room[part]) if full else shares[part] * pace
        left = left - sum(room[part] for part in full) if full else Fraction(0)
        open_ -= full
    return shares_given


@examples(60)
@given(data=st.data(), parts=st.integers(1, 7), total=st.integers(0, 90))
def test_divides_in_proportion_and_never_beyond_the_room(data: st.DataObject, parts: int, total: int) -> None:
    shares = data.draw(st.lists(st.integers(1, 12), min_size=parts, max_size=parts))
    room = data.draw(st.lists(st.integers(0, 20), min_size=parts, max_size=parts))
    found = divide(torch.tensor([shares]).double(), torch.tensor([total]), torch.tensor([room]))[0].tolist()
    assert sum(found) == min(total, sum(room))
    assert all(0 <= count <= most for count, most in zip(found, room, strict=True))
    # Rounded to a neighbour; 1e-6 for a share that is never quite zero.
    for count, ideal in zip(found, level(shares, total, room), strict=True):
        assert abs(count - ideal) < 1 + Fraction(1, 10**6)


def test_no_share_at_all_is_an_equal_share() -> None:
    shares = torch.tensor([[0.0, 0.0, 0.0], [0.0, 5.0, 0.0], [1.0, 1.0, 2.0]])
    total, room = torch.tensor([6, 9, 8]), torch.tensor([[9, 9, 9], [4, 5, 4], [9, 9, 3]])
    assert divide(shares, total, room).tolist() == [[2, 2, 2], [2, 5, 2], [3, 2, 3]]


def naive_pool(values: list[list[float]], total: int, least: list[int]) -> list[int]:
    """The least of every part, then the best of the rest; of equal ones the earlier place, then the later part."""
    order = [
        sorted((e for e in range(len(part)) if part[e] != -math.inf), key=lambda e: (part[e], e), reverse=True)
        for part in values
    ]
    certain = [(part, index) for part, ranking in enumerate(order) for index in ranking[: least[part]]]
    candidates = [(part, index) for part, ranking in enumerate(order) for index in ranking[least[part] :]]
    candidates.sort(key=lambda entry: (values[entry[0]][entry[1]], -entry[1], entry[0]), reverse=True)
    chosen = (certain + candidates)[: max(total, 0)]
    return [sum(part == part_index for part, _ in chosen) for part_index in range(len(values))]


@examples(80)
@given(data=st.data(), parts=st.integers(1, 4), entries=st.integers(1, 9), double=st.booleans(), few=st.booleans())
def test_the_best_of_all_parts_are_counted(
    data: st.DataObject, parts: int, entries: int, double: bool, few: bool
) -> None:
    """Where the least is too much, the best of it stay."""
    number = st.sampled_from([-math.inf, -3e38, -1.0, 0.0, 0.5, 0.5, 1.0, 2.0, 3e38]) | st.floats(-5, 5, width=32)
    values = data.draw(st.lists(st.lists(number, min_size=entries, max_size=entries), min_size=parts, max_size=parts))
    existing = [sum(value != -math.inf for value in part) for part in values]
    least = [data.draw(st.integers(0, count)) for count in existing]
    total = data.draw(st.integers(0, sum(least)) if few else st.integers(sum(least), entries * parts + 2))
    tensor = torch.tensor([values], dtype=torch.float64 if double else torch.float32)
    found = pooled_counts(tensor, torch.tensor([total]), torch.tensor([least]))[0].tolist()
    assert sum(found) == min(total, sum(existing))
    if few:
        assert all(count <= most for count, most in zip(found, least, strict=True))
    else:
        assert found == naive_pool(values, total, least)


@examples(80)
@given(
    keep=st.integers(1, 30) | st.integers(1, 100).map(lambda percent: percent / 100) | st.none(),
    entry_counts=st.lists(st.lists(st.integers(1, 24), min_size=2, max_size=2), min_size=1, max_size=4),
    heads=st.integers(1, 3),
)
def test_all_heads_of_all_layers_share_one_number(
    keep: int | float | None, entry_counts: list[list[int]], heads: int
) -> None:
    observations = [
        observe(Shape(tuple(of_layer), heads, 2, 3, 3), layer=layer, layers=range(len(entry_counts)))
        for layer, of_layer in enumerate(entry_counts)
    ]
    for request, total in enumerate(total_entries(observations, Budget(keep)).tolist()):
        existing = heads * sum(of_layer[request] for of_layer in entry_counts)
        if isinstance(keep, float):
            assert total == max(1, existing * round(keep * 100) // 100)
        else:
            assert total == (existing if keep is None else min(keep * heads * len(entry_counts), existing))


# --- allocators that divide by what layers hold


@every_kind
@examples(60)
@given(
    entry_counts=st.lists(st.integers(1, 24), min_size=1, max_size=5), seed=st.integers(0, 99), keep=st.integers(1, 40)
)
def test_layers_that_hold_different_numbers_share_what_there_is(
    kind: type[LayerAllocator], entry_counts: list[int], seed: int, keep: int
) -> None:
    """At an event after others the other layers keep what one is too short for."""
    found = counts(kind(Given()), holding(entry_counts, 30, seed), Budget(keep, recent=min(keep, 3)))
    assert sum(found) == min(keep * len(entry_counts), sum(entry_counts))
    assert all(1 <= count <= most for count, most in zip(found, entry_counts, strict=True))


@every_kind
def test_what_is_inside_chooses_in_each_layer(kind: type[LayerAllocator]) -> None:
    observations, budget, scorer = model(Shape((40, 19), 2, 2, 4, 4), 4), Budget(9, recent=3), SnapKV(window=3)
    for request in range(2):
        numbers = counts(kind(scorer), observations, budget, request)
        for inner in (scorer, AdaKV(scorer), CriticalKV(scorer), AdaKV(CriticalKV(scorer))):
            expected = [
                heads_of(inner, observation, Budget(number, budget.sinks, min(budget.recent, number)), request)
                for observation, number in zip(observations, numbers, strict=True)
            ]
            assert sets_of(kind(inner), observations, budget, request) == expected


# --- PyramidKV


def schedule(length: int, keep: int, always: int, layers: int, beta: Fraction) -> list[Fraction]:
    """Unrounded: falls from layer to layer by the same step, keeps its mean, and fits the text."""
    always = min(keep, always)
    divisible = Fraction(keep - always)
    last = divisible / beta
    first = 2 * divisible - last
    if always + first > length:
        first = Fraction(length - always)
        last = 2 * divisible - first
    if layers == 1:
        return [Fraction(keep)]
    return [always + first + (last - first) * depth / (layers - 1) for depth in range(layers)]


@examples(60, derandomize=False)
@given(
    length=st.integers(1, 60),
    keep=st.integers(1, 60),
    layers=st.integers(1, 9),
    beta=st.sampled_from([1, 2, 3, 20, 1000]),
    always=st.tuples(st.integers(0, 3), st.integers(0, 5)),
)
def test_matches_the_linear_schedule(length: int, keep: int, layers: int, beta: int, always: tuple[int, int]) -> None:
    keep, observations = max(keep, sum(always)), model(Shape((length,), 2, 1, 1, 1), layers)
    got = counts(Pyramid(Knorm(), beta=beta), observations, Budget(keep, *always))
    keep = min(keep, length)
    ideal = schedule(length, keep, sum(always), layers, Fraction(beta))
    assert sum(got) == layers * keep == sum(ideal)
    assert all(0 <= count <= length for count in got)
    # Sums over the first layers are rounded down; 1e-6 may lift one that is a hair below a whole number.
    for depth in range(1, layers + 1):
        assert 0 <= sum(ideal[:depth]) + Fraction(1, 10**6) - sum(got[:depth]) < 1 + Fraction(1, 10**6)
    assert all(later <= earlier + 1 for earlier, later in pairwise(got))


@pytest.mark.parametrize(
    ("length", "options", "budget", "layers", "kept"),
    [
        (100, {}, Budget(20), range(5), [39, 29, 20, 11, 1]),  # from 2 * 20 - 20 / 20 down to 1, in steps of 38 / 4
        (100, {}, Budget(20), (3, 7, 11), [39, 20, 1]),  # depth counts compressed layers and not their indices
        (24, {}, Budget(20), range(5), [24, 22, 20, 18, 16]),  # the slope is what a short text allows
        (20, {}, Budget(20), range(5), [20] * 5),
        (100, dict(beta=2), Budget(12, sinks=2, recent=6), range(3), [14, 12, 10]),  # 8 in every layer, and 6, 4, 2
        (50, dict(beta=1), Budget(7), range(6), [7] * 6),
        (768, dict(window=64), Budget(256), range(28), [256] * 28),  # AMS' program: 256 / 20 are fewer than 64
        (4096, dict(window=64), Budget(1229), range(3), [1229] * 3),  # kvpress at a ratio of 0.7
        (4096, dict(window=64), Budget(2048), range(3), [3993, 2048, 103]),  # and at 0.5
    ],
)
def test_schedules_by_hand(
    length: int, options: dict[str, int], budget: Budget, layers: Sequence[int], kept: list[int]
) -> None:
    observations = [observe(Shape((length,), 1, 1, 1, 1), layer=layer, layers=layers) for layer in layers]
    assert counts(Pyramid(Knorm(), **options), observations, budget) == kept


@examples(100)
@given(
    length=st.integers(2, 5000),
    percent=st.integers(1, 100),
    layers=st.integers(2, 40),
    beta=st.sampled_from([1, 2, 20]),
    window=st.sampled_from([1, 8, 64]),
)
def test_with_a_window_it_is_the_form_of_kvpress(
    length: int, percent: int, layers: int, beta: int, window: int
) -> None:
    """kvpress 0.5.5, `PyramidKVPress.get_layer_budget`, but for rounding; all layers together keep the same."""
    keep = max(1, length * percent // 100)
    got = counts(Pyramid(Knorm(), beta=beta, window=window), model(Shape((length,), 1, 1, 1, 1), layers), Budget(keep))
    low = Fraction(keep, beta)
    high = 2 * keep - low
    if high >= length - window:
        high = Fraction(length - window)
        low = 2 * keep - high
    if not length >= high >= low >= window:
        assert got == [keep] * layers
        return
    assert sum(got) == keep * layers
    for layer, count in enumerate(got):
        assert abs(count - (high - layer * (high - low) / (layers - 1))) <= 1 + Fraction(1, 10**5)


@pytest.mark.parametrize("heads", [(3, 2), (1, 4)], ids=["gqa", "mqa"])
@pytest.mark.parametrize("budget", [Budget(11, sinks=1, recent=3), Budget(0.37, recent=3)], ids=str)
@pytest.mark.parametrize("method", [AdaKV(Pyramid(SnapKV(window=3))), Pyramid(AdaKV(SnapKV(window=3)))], ids=str)
def test_pyramid_and_adakv_compose(method: Method, heads: tuple[int, int], budget: Budget) -> None:
    """Within a layer it is AdaKV with that layer's number."""
    observations, scorer = model(Shape((40, 19), *heads, 4, 4), 6), SnapKV(window=3)
    for request, length in enumerate((40, 19)):
        count = min(budget.keep, length) if isinstance(budget.keep, int) else math.floor(length * 0.37)
        numbers = counts(Pyramid(scorer), observations, budget, request)
        found = sets_of(method, observations, budget, request)
        assert [sum(map(len, layer)) for layer in found] == [number * heads[0] for number in numbers]
        assert sum(numbers) == 6 * count
        if not request:
            budgets = [Budget(number, budget.sinks, budget.recent) for number in numbers]
            assert found == [
                heads_of(AdaKV(scorer), *layer_and_budget)
                for layer_and_budget in zip(observations, budgets, strict=True)
            ]


@examples(50, derandomize=False)
@given(
    length=st.integers(6, 60),
    keep=st.integers(6, 60),
    entry_counts=st.lists(st.integers(1, 60), min_size=1, max_size=9),
)
def test_what_layers_hold_after_an_event_does_not_change_what_they_aim_at(
    length: int, keep: int, entry_counts: list[int]
) -> None:
    method, budget = Pyramid(Knorm(), beta=3), Budget(keep, sinks=2, recent=4)
    aims = counts(method, model(Shape((length,), 2, 1, 1, 1), len(entry_counts)), budget)
    entry_counts = [min(count, length) for count in entry_counts]
    assert counts(method, holding(entry_counts, length), budget) == list(map(min, aims, entry_counts))


# --- ZigZagKV


def minimum(observation: Observation, request: int, window: int, mass: float) -> float:
    """Mean over KV heads of how many of the best entries receive the share `mass`, counted one by one."""
    heads, total = observation.keys.shape[1], 0
    for head in range(heads):
        usage, got, count = mean_window(observation, request, range(head, head + 1), window), 0.0, 0
        for number in sorted(usage, reverse=True):
            if count and got >= mass * sum(usage):
                break
            got, count = got + number, count + 1
        total += count
    return total / heads


@examples(120)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=2),
    heads=st.tuples(st.integers(1, 3), st.sampled_from([1, 3, 8])),
    layers=st.integers(1, 4),
    keep=st.integers(2, 24),
    shares=st.tuples(st.sampled_from([0.9, 0.5, 0.0]), st.sampled_from([0.0, 0.2, 1.0])),
    dtype=st.sampled_from(DTYPES),
)
def test_layers_get_equation_six(
    lengths: list[int], heads: tuple[int, int], layers: int, keep: int, shares: tuple[float, float], dtype: torch.dtype
) -> None:
    shape = Shape(tuple(lengths), *heads, 3, 2)
    observations = [  # of some layers attention is spread, of others it is sharp
        observe(shape, seed=layer, layer=layer, layers=range(layers), dtype=dtype, softmax=Softmax(0.1 + 2.0 * layer))
        for layer in range(layers)
    ]
    mass, floor = shares
    method = ZigZag(Knorm(), window=3, mass=mass, floor=floor)
    for request, length in enumerate(lengths):
        mean = min(keep, length) - 1  # besides the entry that every layer has in any case
        minima = [method._minimum(observation)[request].item() for observation in observations]
        if dtype == torch.float32:
            assert minima == pytest.approx([minimum(observation, request, 3, mass) for observation in observations])
        ideal = [1 + floor * mean + (1 - floor) * mean * layers * number / sum(minima) for number in minima]
        got = counts(method, observations, Budget(keep), request)
        assert sum(got) == min(keep, length) * layers
        if max(ideal) <= length:
            assert all(abs(count - number) < 1 + 1e-6 for count, number in zip(got, ideal, strict=True))
        else:
            assert max(got) == length


def test_attention_that_overflowed_counts_as_one_entry() -> None:
    observation = observe(Shape((9,), 1, 2, 3, 3))
    observation.keys[0, 0, 2] = float("nan")
    assert ZigZag(Knorm(), window=3)._minimum(observation).tolist() == [1.0]


@pytest.mark.parametrize(("scorer", "window"), [(Knorm(), 16), (SnapKV(window=32), 32)])
def test_needs_the_window_that_it_or_its_scorer_looks_at(scorer: Method, window: int) -> None:
    assert ZigZag(scorer, window=16).traits.needs.window == window


# --- DynamicKV


def naive_updates(scores: Scores, keep: int, r_max: int, interval: int) -> list[int]:
    """Update after update: count who has the best scores so far, divide everything among them, cut."""
    layers, heads, length = len(scores), len(scores[0]), len(scores[0][0])
    divisible, room = (keep - 1) * layers, length - 1
    per_layer = [min(r_max * (keep - 1), room)] * layers
    for layer in range(layers):
        if (layer + 1) % interval and layer + 1 < layers:
            continue
        pool = [
            (scores[layer_index][head][entry], entry, layer_index, head)
            for layer_index in range(layer + 1)
            for head in range(heads)
            for entry in range(length)
        ]
        best = sorted(pool, reverse=True)[: (keep - 1) * heads * (layer + 1)]
        shares = [sum(layer_index == which for _, _, which, _ in best) for layer_index in range(layer + 1)]
        total = min(divisible, sum(per_layer[: layer + 1]))
        if sum(min(most, share * 10**9) for most, share in zip(per_layer, shares, strict=False)) < total:
            shares = [share * 10**9 + sum(shares) for share in shares]  # never quite zero
        per_layer[: layer + 1] = rounded(level(shares, divisible, per_layer[: layer + 1]), total)
    return [1 + count for count in per_layer]


@examples(60)
@given(data=st.data(), keep=st.integers(1, 12), r_max=st.sampled_from([1, 2, 10]), interval=st.integers(1, 4))
def test_matches_the_updates_written_out(data: st.DataObject, keep: int, r_max: int, interval: int) -> None:
    layers, heads, length = (data.draw(st.integers(1, most)) for most in (5, 3, 12))
    keep = min(keep, length)
    # All scores differ, so that it is not ties that decide; their order is random.
    numbers = data.draw(st.permutations(range(layers * heads * length)))
    shifts = data.draw(st.lists(st.integers(0, 2), min_size=layers, max_size=layers))
    table: Tensor = (
        torch.tensor(numbers).float().view(layers, heads, length) + 100.0 * torch.tensor(shifts)[:, None, None]
    )
    scores = table.flatten().argsort().argsort().view(table.shape).float().tolist()
    got = counts(Dynamic(Given(), r_max=r_max, interval=interval), given_scores(*scores), Budget(keep))
    assert sum(got) == keep * layers
    # Who is a hair next to a half may be rounded to either side.
    expected = naive_updates(scores, keep, r_max, interval)
    assert all(abs(count - right) <= 1 for count, right in zip(got, expected, strict=True))


def rising(entries: int, *bases: int) -> list[Observation]:
    return given_scores(*([[float(base + entry) for entry in range(entries)]] for base in bases))


FEW = [1000.0 + entry if entry < 10 else -entry for entry in range(40)]
LOW, MID = ([float(base + entry) for entry in range(40)] for base in (0, 100))


@pytest.mark.parametrize(
    ("observations", "keep", "options", "kept"),
    [
        # The 30 best of the pool: 130 to 154 in the second layer alone, 128 and 129 in two, 127 where it comes earlier.
        (rising(30, 100, 125, 0), 11, dict(interval=3), [1 + 2, 1 + 28, 1]),
        # A layer holds at most r_max times the mean.
        (rising(100, 0, 1000, 0), 11, dict(r_max=1), [11, 11, 11]),
        (rising(100, 0, 1000, 0), 11, dict(r_max=2), [6, 21, 6]),
        (rising(100, 0, 1000, 0), 11, dict(r_max=10), [1, 31, 1]),
        # The second layer has the 10 best scores: among two layers that is all that counts, among four it is not. What
        # an update cut does not come back.
        (given_scores([MID], [FEW], [LOW], [LOW]), 5, dict(interval=4), [7, 11, 1, 1]),
        (given_scores([MID], [FEW], [LOW], [LOW]), 5, dict(interval=2), [1, 17, 1, 1]),
        *(
            (given_scores(*[[[score] * 10] * 2] * 3), 4, dict(interval=1), [4] * 3)
            for score in (0.0, math.nan, math.inf)
        ),
    ],
    ids=range(9),
)
def test_updates_by_hand(observations: list[Observation], keep: int, options: dict[str, int], kept: list[int]) -> None:
    assert counts(Dynamic(Given(), **options), observations, Budget(keep)) == kept
