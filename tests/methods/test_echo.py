"""Echo against its formula, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from keepset.methods.echo import Echo
from keepset.observation import Needs, Observation
from tests.methods.naive import EXACT, SHAPES, Shape, check_scores, length_of, observe


def naive_scores(observation: Observation, request: int, stride: int) -> list[list[float]]:
    """Scores of one request, `[kv_heads][entries]`."""
    kv_heads, length = observation.keys.shape[1], length_of(observation, request)
    squares = observation.echoes[stride][request].double().tolist()
    group = len(squares) // kv_heads
    return [
        [sum(math.sqrt(squares[head * group + one][entry]) for one in range(group)) / group for entry in range(length)]
        for head in range(kv_heads)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stride", [1, 3])
def test_scores_are_the_groups_mean_root_of_mean_squares(shape: Shape, stride: int) -> None:
    query_heads = shape.kv_heads * shape.group
    squares = torch.rand(shape.batch, query_heads, shape.entries, generator=torch.Generator().manual_seed(5))
    observation = observe(shape, echoes={stride: squares, 2: squares + 1})
    expected = [naive_scores(observation, request, stride) for request in range(shape.batch)]
    check_scores(Echo(stride=stride), observation, expected, **EXACT)


def test_the_prompts_queries_are_needed_and_first_and_newest_stay() -> None:
    assert Echo(stride=3).needs == Needs(echoes=frozenset({3})) and Echo().needs == Needs(echoes=frozenset({1}))
    assert Echo().needs.hidden_states
    assert (Echo().sinks, Echo().recent) == (4, 8)
