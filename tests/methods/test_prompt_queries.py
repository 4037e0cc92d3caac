"""PromptQueries against its formula, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from keepset.core.feature import Needs
from keepset.core.features.attention import PromptQueryAttention, SecondPass
from keepset.core.observation import Observation
from keepset.kernels.columns import ColumnStatistic
from keepset.methods.prompt_queries import PromptQueries
from tests.methods.naive import EXACT, SHAPES, Shape, check_scores, length_of, observe, of_a_second_pass


def naive_scores(method: PromptQueries, observation: Observation, request: int) -> list[list[float]]:
    """Scores of one request, `[kv_heads][entries]`."""
    kv_heads, length = observation.keys.shape[1], length_of(observation, request)
    squares = observation[PromptQueryAttention(method.stride)]
    received = [[math.sqrt(square) for square in row] for row in squares[request].tolist()]
    for needed in method.traits.needs.of(SecondPass):
        told = observation[needed]
        for row, squares in zip(received, told.statistics["square"][request].tolist(), strict=True):
            for entry, square in enumerate(squares):
                row[entry] += math.sqrt(square / int(told.tokens[request])) / 2
    group = len(received) // kv_heads
    return [
        [sum(received[head * group + one][entry] for one in range(group)) / group for entry in range(length)]
        for head in range(kv_heads)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", [PromptQueries(), PromptQueries(stride=3), PromptQueries(second_pass=True)])
def test_scores_are_the_groups_mean_root_of_mean_squares(shape: Shape, method: PromptQueries) -> None:
    query_heads = shape.kv_heads * shape.group
    draw = torch.Generator().manual_seed(5)
    squares, columns = torch.rand(2, shape.batch, query_heads, shape.entries, generator=draw)
    passes = dict.fromkeys(method.traits.needs.of(SecondPass), of_a_second_pass(columns))
    asked = {PromptQueryAttention(method.stride): squares, PromptQueryAttention(2): squares + 1}
    observation = observe(shape, features={**asked, **passes})
    expected = [naive_scores(method, observation, request) for request in range(shape.batch)]
    check_scores(method, observation, expected, **EXACT)


def test_the_prompts_queries_are_needed_and_first_and_newest_stay() -> None:
    assert PromptQueries(stride=3).traits.needs == Needs(PromptQueryAttention(3))
    assert PromptQueries().traits.needs == Needs(PromptQueryAttention(1)) and PromptQueries().traits.needs.unrotated
    squares = SecondPass(frozenset({ColumnStatistic.SQUARE}), chunk=0)
    assert PromptQueries(second_pass=True).traits.needs == Needs(PromptQueryAttention(1), squares)
    assert (PromptQueries().traits.sinks, PromptQueries().traits.recent) == (4, 8)
