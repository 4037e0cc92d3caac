import math

import pytest
import torch

from keepset import Budget
from keepset.methods.random import Random
from tests.methods.naive import SHAPES, Shape, alone, kept, observe

LONG = Shape((4000,), 2, 1, 1, 1)


def numbers(seed: int = 0, layer: int = 0, head: int = 0) -> list[float]:
    observation = observe(LONG, layer=layer)
    return Random(seed=seed).score(observation)[0, head].tolist()


def correlation(a: list[float], b: list[float]) -> float:
    return float(torch.corrcoef(torch.tensor([a, b]))[0, 1])


def test_repeats() -> None:
    assert numbers(seed=3, layer=2, head=1) == numbers(seed=3, layer=2, head=1)


@pytest.mark.parametrize("other", [dict(seed=1), dict(layer=1), dict(head=1), dict(seed=2**31 - 1)])
def test_seeds_layers_and_heads_draw_independently(other: dict[str, int]) -> None:
    first, second = numbers(), numbers(**other)
    assert sum(a == b for a, b in zip(first, second, strict=True)) <= 1
    assert abs(correlation(first, second)) < 4 / math.sqrt(len(first))


@pytest.mark.parametrize("head", [0, 1])
def test_about_uniform(head: int) -> None:
    drawn = numbers(head=head)
    assert min(drawn) >= 0 and max(drawn) <= 1
    bins = [0] * 20
    for number in drawn:
        bins[min(int(number * 20), 19)] += 1
    expected = len(drawn) / 20
    chi_square = sum((count - expected) ** 2 / expected for count in bins)
    assert chi_square < 43.8  # exceeded by one in a thousand, for 19 degrees of freedom
    assert abs(correlation(drawn[1:], drawn[:-1])) < 4 / math.sqrt(len(drawn))


def test_depends_on_the_position_and_not_on_the_place_in_the_cache() -> None:
    whole = Random().score(observe(Shape((40,), 2, 1, 3, 3)))
    positions = torch.arange(0, 40, 3).expand(1, 2, -1)
    thinned = Random().score(observe(Shape((14,), 2, 1, 3, 3), positions=positions))
    assert torch.equal(thinned, whole[:, :, ::3])


@pytest.mark.parametrize("shape", SHAPES)
def test_same_in_any_row_of_a_batch(shape: Shape) -> None:
    observation = observe(shape, layer=3)
    together = Random(seed=5).select(observation, Budget(0.5))
    for request in range(shape.batch):
        single = alone(observation, request)
        for head in range(shape.kv_heads):
            expected = kept(Random(seed=5).select(single, Budget(0.5)), single, 0, head)
            assert kept(together, observation, request, head) == expected
