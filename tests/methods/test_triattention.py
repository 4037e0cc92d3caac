import math
from dataclasses import replace

import torch

from keepset import Budget, Observation
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.statistics import LayerStatistics, Statistics
from keepset.methods.triattention import TriAttention
from tests.methods.naive import Shape, kept, observe


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
    """Return one key, rotated to every position."""
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
