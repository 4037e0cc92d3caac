import cmath
import math
from dataclasses import replace

import pytest
import torch

from keepset import Budget, Observation
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.statistics import LayerStatistics, Statistics
from keepset.methods.triattention import TriAttention
from tests.methods.naive import DTYPES, EXACT, SHAPES, Shape, check_scores, kept, length_of, observe


def planes(measured: LayerStatistics) -> list[tuple[int, int | None, float]]:
    """The two numbers of every plane, or a number by itself, and its frequency."""
    partner, frequency = measured.partner.tolist(), measured.frequency.double().tolist()
    return [
        (first, None if second == first else second, frequency[second])
        for first, second in enumerate(partner)
        if first <= second
    ]


def pair(row: list[float], first: int, second: int | None) -> complex:
    return complex(row[first], 0.0 if second is None else row[second])


def naive_scores(observation: Observation, horizon: int, request: int, query_head: int) -> list[float]:
    """Of one query head, standardised: keys un-rotated, then the series term by term."""
    measured = observation[ModelStatistics("")].layers[observation.layer]
    head = query_head * observation.keys.shape[1] // len(measured.mean)
    length, now = length_of(observation, request), int(observation.lengths[request])
    keys = observation.keys[request, head, :length].double().tolist()
    positions = observation.positions[request, head, :length].tolist()
    mean, norm = measured.mean[query_head].double().tolist(), measured.norm[query_head].double().tolist()
    offsets = [2**n for n in range(40) if 2**n <= horizon]
    scores = []
    for key, position in zip(keys, positions, strict=True):
        score = 0.0
        for first, second, frequency in planes(measured):
            gain = float(measured.gain[first])
            plain = pair(key, first, second) * cmath.exp(-1j * frequency * position) / gain
            centre = pair(mean, first, second)
            angle = cmath.phase(centre * plain.conjugate())
            for offset in offsets:
                turned = math.cos(frequency * (now + offset - position) + angle)
                score += gain**2 * abs(centre) * abs(plain) * turned / len(offsets)
            concentration = abs(centre) / norm[first]
            score += gain**2 * (1 - concentration) * norm[first] * abs(plain)
        scores.append(score)
    average = sum(scores) / length
    deviation = math.sqrt(sum((score - average) ** 2 for score in scores) / length)
    return [(score - average) / max(deviation, 1e-6) for score in scores]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("horizon", [65536, 1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_the_trigonometric_series_and_the_norms(shape: Shape, horizon: int, dtype: torch.dtype) -> None:
    observation = observe(shape, dtype=dtype, layer=3, layers=(1, 3))
    expected = [
        [
            [max(scores) for scores in zip(*members, strict=True)]
            for head in range(shape.kv_heads)
            for members in [
                [naive_scores(observation, horizon, request, head * shape.group + m) for m in range(shape.group)]
            ]
        ]
        for request in range(shape.batch)
    ]
    # Frequencies are float32 numbers, multiplied by up to 65536, on either side.
    check_scores(TriAttention(horizon=horizon), observation, expected, **{**EXACT, "rtol": 2e-3, "atol": 2e-4})


def test_positions_after_a_compression_are_the_original_ones() -> None:
    shape = Shape((7,), 2, 2, 6, 4)
    positions = torch.tensor([[[0, 3, 4, 9, 11, 12, 20], [1, 2, 3, 4, 5, 6, 20]]])
    observation = observe(shape, positions=positions)
    expected = [
        [
            [
                max(pairs)
                for pairs in zip(*(naive_scores(observation, 64, 0, 2 * head + m) for m in (0, 1)), strict=True)
            ]
            for head in range(2)
        ]
    ]
    check_scores(TriAttention(horizon=64), observation, expected, **{**EXACT, "rtol": 2e-3, "atol": 2e-4})


def one_plane(mean: float, norm: float, frequency: float) -> dict[ModelStatistics, Statistics]:
    layer = LayerStatistics(
        direction=torch.zeros(1, 2),
        mean=torch.tensor([[mean, 0.0]]),
        covariance=torch.zeros(1, 2, 2),
        norm=torch.tensor([[norm, norm]]),
        partner=torch.tensor([1, 0]),
        frequency=torch.tensor([-frequency, frequency]),
        gain=torch.ones(2),
    )
    return {ModelStatistics(""): Statistics({0: layer})}


def rotated(length: int, frequency: float) -> torch.Tensor:
    """The same key at every position."""
    angles = torch.arange(length) * frequency
    return torch.stack([angles.cos(), angles.sin()], -1)[None, None]


def test_concentrated_queries_prefer_a_distance() -> None:
    # One turn in 16 positions: keys 16 before the next query but one, at position 24, point its way.
    frequency = math.tau / 16
    keys = rotated(23, frequency)
    observation = Observation(keys=keys, values=keys, features=one_plane(1.0, 1.0, frequency))
    keep_set = TriAttention(horizon=1).select(observation, Budget(1))
    assert kept(keep_set, observation, 0, 0) == [8]


def test_spread_queries_look_at_norms_alone() -> None:
    keys = rotated(12, 0.7)
    keys[0, 0, 5] *= 3
    keys[0, 0, 2] *= 2
    observation = Observation(keys=keys, values=keys, features=one_plane(0.0, 1.0, 0.7))
    assert kept(TriAttention().select(observation, Budget(2)), observation, 0, 0) == [2, 5]


def test_a_number_that_overflowed_leaves_the_other_scores_alone() -> None:
    observation = observe(Shape((8,), 1, 2, 4, 4))
    before = TriAttention().score(observation)
    observation.keys[0, 0, 3] = math.inf
    after = TriAttention().score(observation)
    others = [entry for entry in range(8) if entry != 3]
    assert after[0, 0, others].isfinite().all() and before.isfinite().all()


def test_planes_need_not_be_halves() -> None:
    """Neighbours as partners: the same model with its numbers in another order keeps the same."""
    observation = observe(Shape((15,), 2, 2, 6, 4))
    order = [0, 3, 1, 4, 2, 5]
    layer = observation[ModelStatistics("")].layers[0]
    place = torch.tensor(order).argsort()
    turned = replace(
        layer,
        direction=layer.direction[:, order],
        mean=layer.mean[:, order],
        covariance=layer.covariance[:, order][:, :, order],
        norm=layer.norm[:, order],
        partner=place[layer.partner[order]],
        frequency=layer.frequency[order],
        gain=layer.gain[order],
    )
    features = {ModelStatistics(""): Statistics({0: turned})}
    other = Observation(keys=observation.keys[..., order], values=observation.values, features=features)
    torch.testing.assert_close(TriAttention().score(other), TriAttention().score(observation), rtol=1e-5, atol=1e-5)
