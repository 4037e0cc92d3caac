from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, Observation
from keepset.allocators.zigzag import ZigZag
from keepset.methods.knorm import Knorm
from keepset.methods.snapkv import SnapKV
from tests.methods.naive import DTYPES, SHAPES, Shape, length_of, observe, window_attention
from tests.tiers import examples


def minimum(observation: Observation, request: int, window: int, mass: float) -> float:
    """Mean over KV heads of how many of the best entries receive the share `mass`, counted one by one."""
    heads = observation.keys.shape[1]
    group = observation.queries.shape[1] // heads
    total = 0
    for head in range(heads):
        members = range(head * group, head * group + group)
        rows = [row for member in members for row in window_attention(observation, request, member, window)]
        usage = [sum(row[entry] for row in rows) for entry in range(length_of(observation, request))]
        got, count = 0.0, 0
        for number in sorted(usage, reverse=True):
            if count and got >= mass * sum(usage):
                break
            got, count = got + number, count + 1
        total += count
    return total / heads


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mass", [0.0, 0.5, 0.9])
def test_the_minimum_is_counted_one_by_one(shape: Shape, mass: float) -> None:
    observation = observe(shape)
    minima = ZigZag(Knorm(), window=4, mass=mass)._minimum(observation)
    for request in range(shape.batch):
        assert minima[request].item() == pytest.approx(minimum(observation, request, 4, mass))


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=2),
    heads=st.tuples(st.integers(1, 3), st.sampled_from([1, 3, 8])),
    layers=st.integers(1, 4),
    keep=st.integers(2, 24),
    floor=st.sampled_from([0.0, 0.2, 1.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_layers_get_equation_six(
    lengths: list[int], heads: tuple[int, int], layers: int, keep: int, floor: float, dtype: torch.dtype
) -> None:
    shape = Shape(tuple(lengths), *heads, 3, 2)
    observations = [  # of some layers attention is spread, of others it is sharp
        observe(shape, seed=layer, layer=layer, layers=range(layers), dtype=dtype, scaling=0.1 + 2.0 * layer)
        for layer in range(layers)
    ]
    method = ZigZag(Knorm(), window=3, floor=floor)
    counts = method.select_all(observations, Budget(keep)).counts
    for request, length in enumerate(lengths):
        mean = min(keep, length) - 1  # besides the entry that every layer has in any case
        minima = [method._minimum(observation)[request].item() for observation in observations]
        if dtype == torch.float32:
            assert minima == pytest.approx([minimum(observation, request, 3, 0.9) for observation in observations])
        ideal = [1 + floor * mean + (1 - floor) * mean * layers * number / sum(minima) for number in minima]
        got = counts[:, request, 0].tolist()
        assert sum(got) == min(keep, length) * layers
        if max(ideal) <= length:
            assert all(abs(count - number) < 1 + 1e-6 for count, number in zip(got, ideal, strict=True))
        else:
            assert max(got) == length


def test_spread_attention_gets_more() -> None:
    sharp, spread = (
        observe(Shape((50,), 2, 2, 4, 4), layer=layer, layers=[0, 1], scaling=scaling)
        for layer, scaling in enumerate((20.0, 0.0))
    )
    counts = ZigZag(SnapKV(window=4), window=4).select_all([sharp, spread], Budget(20, recent=4)).counts[:, 0, 0]
    assert counts.sum() == 40 and counts[1] > 2 * counts[0] > 4
    even = ZigZag(SnapKV(window=4), window=4, floor=1).select_all([sharp, spread], Budget(20, recent=4)).counts
    assert even.flatten().tolist() == [20] * 4


def test_attention_that_overflowed_counts_as_one_entry() -> None:
    observation = observe(Shape((9,), 1, 2, 3, 3))
    observation.keys[0, 0, 2] = float("nan")
    assert ZigZag(Knorm(), window=3)._minimum(observation).tolist() == [1.0]


def test_needs_the_window_that_it_or_its_scorer_looks_at() -> None:
    assert ZigZag(Knorm(), window=16).traits.needs.window == 16
    assert ZigZag(SnapKV(window=32), window=16).traits.needs.window == 32
