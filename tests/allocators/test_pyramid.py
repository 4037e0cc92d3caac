from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, KeepsetError, Observation
from keepset.allocators.adakv import AdaKV
from keepset.allocators.pyramid import Pyramid
from keepset.methods.knorm import Knorm
from keepset.methods.snapkv import SnapKV
from tests.methods.naive import Shape, kept, observe
from tests.tiers import examples


def model(shape: Shape, layers: int) -> list[Observation]:
    return [observe(shape, seed=layer, layer=layer, layers=range(layers)) for layer in range(layers)]


def counts(method: Pyramid, shape: Shape, layers: int, budget: Budget, request: int = 0) -> list[int]:
    """Return what every layer keeps, the same in each of its heads."""
    per_layer = method.select_all(model(shape, layers), budget).counts[:, request].tolist()
    assert all(len(set(heads)) == 1 for heads in per_layer)
    return [heads[0] for heads in per_layer]


def schedule(length: int, keep: int, always: int, layers: int, beta: Fraction) -> list[Fraction]:
    """Unrounded: falls from layer to layer by the same step, keeps its mean, and fits the text."""
    always = min(keep, always)
    rest = Fraction(keep - always)
    last = rest / beta
    first = 2 * rest - last
    if always + first > length:
        first = Fraction(length - always)
        last = 2 * rest - first
    if layers == 1:
        return [Fraction(keep)]
    return [always + first + (last - first) * depth / (layers - 1) for depth in range(layers)]


@examples(60, derandomize=False)
@given(
    length=st.integers(1, 60),
    keep=st.integers(1, 60),
    layers=st.integers(1, 9),
    beta=st.sampled_from([1, 2, 3, 20, 1000]),
    sinks=st.integers(0, 3),
    recent=st.integers(0, 5),
)
def test_matches_the_linear_schedule(length: int, keep: int, layers: int, beta: int, sinks: int, recent: int) -> None:
    keep = max(keep, sinks + recent)
    got = counts(Pyramid(Knorm(), beta=beta), Shape((length,), 2, 1, 1, 1), layers, Budget(keep, sinks, recent))
    keep = min(keep, length)
    ideal = schedule(length, keep, sinks + recent, layers, Fraction(beta))
    assert sum(got) == layers * keep == sum(ideal)
    assert all(0 <= count <= length for count in got)
    # Sums over the first layers are rounded down; 1e-6 may lift one that is a hair below a whole number.
    for depth in range(1, layers + 1):
        assert 0 <= sum(ideal[:depth]) + Fraction(1, 10**6) - sum(got[:depth]) < 1 + Fraction(1, 10**6)
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(got))


def test_default_schedule_by_hand() -> None:
    # r = 20: from 2 * 20 - 20 / 20 = 39 down to 1, in steps of 38 / 4.
    assert counts(Pyramid(Knorm()), Shape((100,), 2, 1, 1, 1), 5, Budget(20)) == [39, 29, 20, 11, 1]


def test_the_slope_is_what_a_short_text_allows() -> None:
    assert counts(Pyramid(Knorm()), Shape((24,), 1, 1, 1, 1), 5, Budget(20)) == [24, 22, 20, 18, 16]
    assert counts(Pyramid(Knorm()), Shape((20,), 1, 1, 1, 1), 5, Budget(20)) == [20] * 5


def test_what_always_stays_is_outside_the_schedule() -> None:
    budget = Budget(12, sinks=2, recent=6)
    got = counts(Pyramid(Knorm(), beta=2), Shape((100,), 1, 1, 1, 1), 3, budget)
    assert got == [14, 12, 10]  # 8 in every layer, and 6, 4, 2


def test_a_beta_of_one_is_flat() -> None:
    assert counts(Pyramid(Knorm(), beta=1), Shape((50,), 1, 1, 1, 1), 6, Budget(7)) == [7] * 6


def test_requests_of_a_batch_have_schedules_of_their_own() -> None:
    batch = Shape((100, 24), 2, 2, 3, 3)
    method, budget = Pyramid(Knorm()), Budget(20)
    for request, length in enumerate(batch.lengths):
        expected = counts(method, Shape((length,), 2, 2, 3, 3), 5, budget)
        assert counts(method, batch, 5, budget, request) == expected


def test_depth_counts_compressed_layers_and_not_their_indices() -> None:
    layers = [3, 7, 11]
    observations = [observe(Shape((100,), 1, 1, 1, 1), layer=layer, layers=layers) for layer in layers]
    keep_set = Pyramid(Knorm()).select_all(observations, Budget(20))
    assert keep_set.layers == (3, 7, 11)
    assert keep_set.counts.flatten().tolist() == [39, 20, 1]


@pytest.mark.parametrize("shape", [Shape((40, 19), 3, 2, 4, 4), Shape((40, 19), 1, 4, 4, 4)], ids=["gqa", "mqa"])
@pytest.mark.parametrize("budget", [Budget(11, sinks=1, recent=3), Budget(0.37, recent=3)], ids=str)
@pytest.mark.parametrize(
    "method",
    [AdaKV(Pyramid(SnapKV(window=3))), Pyramid(AdaKV(SnapKV(window=3)))],
    ids=["adakv_outside", "pyramid_outside"],
)
def test_pyramid_and_adakv_compose(method: AdaKV | Pyramid, shape: Shape, budget: Budget) -> None:
    layers = 6
    observations = model(shape, layers)
    pyramid = Pyramid(SnapKV(window=3)).select_all(observations, budget)
    keep_set = method.select_all(observations, budget)
    for request, length in enumerate(shape.lengths):
        wanted = min(budget.keep, length) if isinstance(budget.keep, int) else math.floor(length * 0.37)
        totals = keep_set.counts[:, request].sum(-1).tolist()
        assert sum(totals) == layers * shape.kv_heads * wanted
        assert totals == pyramid.counts[:, request].sum(-1).tolist()
    for observation in observations:
        # Within a layer it is AdaKV with that layer's number.
        number = int(pyramid.layer(observation.layer).counts[0, 0])
        alike = AdaKV(SnapKV(window=3)).select(observation, Budget(number, budget.sinks, budget.recent))
        for head in range(shape.kv_heads):
            assert kept(keep_set, observation, 0, head) == kept(alike, observation, 0, head)


@examples(50, derandomize=False)
@given(
    length=st.integers(6, 60),
    keep=st.integers(6, 60),
    layers=st.integers(1, 9),
    held=st.lists(st.integers(1, 60), min_size=9, max_size=9),
)
def test_what_layers_hold_after_an_event_does_not_change_what_they_aim_at(
    length: int, keep: int, layers: int, held: list[int]
) -> None:
    method, budget = Pyramid(Knorm(), beta=3), Budget(keep, sinks=2, recent=4)
    aims = counts(method, Shape((length,), 2, 1, 1, 1), layers, budget)
    held = [min(count, length) for count in held[:layers]]
    observations = [
        observe(
            Shape((count,), 2, 1, 1, 1),
            layer=layer,
            layers=range(layers),
            positions=torch.arange(length - count, length).expand(1, 2, count),
        )
        for layer, count in enumerate(held)
    ]
    got = method.select_all(observations, budget).counts[:, 0].tolist()
    assert got == [[min(aim, count)] * 2 for aim, count in zip(aims, held, strict=True)]


def test_a_pyramid_inside_a_pyramid_is_refused() -> None:
    for scorer in (Pyramid(Knorm()), AdaKV(Pyramid(Knorm()))):
        with pytest.raises(KeepsetError, match="use it once"):
            Pyramid(scorer)
