import math
import statistics

import pytest
import torch

from keepset import Budget, Observation
from keepset.methods.lagkv import LagKV
from tests.methods.naive import DTYPES, EXACT, SHAPES, Shape, check_scores, kept, length_of, observe, softmax

Rows = list[list[float]]


def information(states: Rows, following: Rows) -> list[float]:
    """Softmax of the deviation over channels, each scaled by its range in the partition that follows."""
    low = [min(column) for column in zip(*following, strict=True)]
    high = [max(column) for column in zip(*following, strict=True)]
    spread = []
    for row in states:
        scaled = [(x - a) / (b - a) if b > a else 0.0 for x, a, b in zip(row, low, high, strict=True)]
        spread.append(statistics.stdev(scaled) if len(scaled) > 1 else 0.0)
    return softmax(spread)


def naive_scores(observation: Observation, method: LagKV, request: int, head: int) -> list[float]:
    length = length_of(observation, request)
    keys = observation.keys[request, head, :length].float().tolist()
    values = observation.values[request, head, :length].float().tolist()
    scores = [1.0] * length
    start = method.skip
    while start + 2 * method.lag <= length:
        middle, end = start + method.lag, start + 2 * method.lag
        parts = [information(states[start:middle], states[middle:end]) for states in (keys, values)]
        both = [k + v for k, v in zip(*parts, strict=True)]
        for place, own in enumerate(both):
            worse = sum(other < own or (other == own and before < place) for before, other in enumerate(both))
            scores[start + place] = worse / method.lag
        start = middle
    return scores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [LagKV(lag=4, skip=2), LagKV(lag=3, skip=0), LagKV(lag=7, skip=1), LagKV()])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_ranks_by_what_the_next_partition_says(shape: Shape, method: LagKV, dtype: torch.dtype) -> None:
    observation = observe(shape, dtype=dtype)
    expected = [[naive_scores(observation, method, r, h) for h in range(shape.kv_heads)] for r in range(shape.batch)]
    check_scores(method, observation, expected, **EXACT)


def test_every_partition_keeps_the_same_share() -> None:
    observation = observe(Shape((50,), 2, 1, 5, 5))
    method = LagKV(lag=10, skip=4)
    keep_set = method.select(observation, Budget(4 + 16 + 3 * 4, sinks=4, recent=10))
    for head in range(2):
        positions = kept(keep_set, observation, 0, head)
        assert [sum(start <= p < start + 10 for p in positions) for start in (4, 14, 24)] == [4, 4, 4]
        assert set(range(4)) | set(range(34, 50)) <= set(positions)


def test_a_channel_that_does_not_vary_counts_as_zero() -> None:
    observation = observe(Shape((8,), 1, 1, 3, 3))
    observation.keys[..., 4:, 1] = 2.0
    method = LagKV(lag=4, skip=0)
    assert not math.isnan(method.score(observation).sum())
    check_scores(method, observation, [[naive_scores(observation, method, 0, 0)]], **EXACT)
