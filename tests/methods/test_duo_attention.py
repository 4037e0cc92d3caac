"""DuoAttention: how many entries each head keeps, against heads that are filled one after another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, KeepsetError, Observation
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.statistics import Statistics
from keepset.methods.measured import DuoAttention
from tests.methods.naive import Shape, observe, random_statistics, sets_of
from tests.observations import changed
from tests.tiers import examples

LAYERS = (1, 4, 6)


def model(lengths: tuple[int, ...], gates: list[list[float]]) -> list[Observation]:
    """Layers whose heads have these gates."""
    layers = LAYERS[: len(gates)]
    shape = Shape(lengths, len(gates[0]), 2, 3, 2)
    measured = random_statistics(shape, layers)
    retrieval = {layer: torch.tensor(row) for layer, row in zip(layers, gates, strict=True)}
    statistics = {ModelStatistics(""): Statistics(measured.layers, retrieval=retrieval)}
    return [observe(shape, layer=layer, layers=layers, features=statistics) for layer in layers]


def naive(gates: list[float], length: int, total: int, always: int) -> list[int]:
    """One head after another, the highest gate first: whole if the rest can still have what always stays."""
    heads = len(gates)
    least = min(always, length, total // heads)
    counts, left = [least] * heads, total - least * heads
    best_first = sorted(range(heads), key=lambda head: (-gates[head], head))
    while best_first and length > least and left >= length - least:
        counts[best_first.pop(0)] = length
        left -= length - least
    while left:  # one entry each, round after round
        for head in best_first[:left]:
            counts[head] += 1
        left -= len(best_first[:left])
    return counts


@examples(160)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    keep=st.integers(1, 35) | st.integers(1, 100).map(lambda percent: percent / 100),
    always=st.tuples(st.integers(0, 4), st.integers(0, 6)),
    data=st.data(),
)
def test_matches_heads_filled_one_after_another(
    lengths: list[int], sizes: tuple[int, int], keep: int | float, always: tuple[int, int], data: st.DataObject
) -> None:
    (layers, heads), (sinks, recent) = sizes, always
    number = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0, 1, width=32)
    row = st.lists(number, min_size=heads, max_size=heads)
    gates = data.draw(st.lists(row, min_size=layers, max_size=layers))
    observations, everyone = model(tuple(lengths), gates), layers * heads
    keep = max(keep, sinks + recent) if isinstance(keep, int) else keep
    for request, length in enumerate(lengths):
        least = min(max(1, sinks + recent), length)
        share = everyone * length * round(keep * 100) // 100
        total = min(keep, length) * everyone if isinstance(keep, int) else max(everyone * least, share)
        expected = naive([gate for layer in gates for gate in layer], length, total, min(length, sinks) + recent)
        assert sum(expected) == total
        sets = sets_of(DuoAttention(), observations, Budget(keep, sinks, recent), request)
        for positions, count in zip((head for layer in sets for head in layer), expected, strict=True):
            first = min(sinks, count)
            assert positions == [*range(first), *range(length - count + first, length)]
        for observation, of_layer in zip(observations, sets, strict=True):  # each layer decides by itself
            assert sets_of(DuoAttention(), [observation], Budget(keep, sinks, recent), request) == [of_layer]


def test_statistics_without_gates_are_refused() -> None:
    observation = model((10,), [[0.5]])[0]
    old = Statistics(observation[ModelStatistics("")].layers, name="old.safetensors")
    observation = changed(observation, features={ModelStatistics(""): old})
    with pytest.raises(KeepsetError, match=r"'old\.safetensors' do not say which heads retrieve"):
        DuoAttention().select(observation, Budget(4))
