import math

import pytest
import torch

from keepset import Budget
from keepset.methods.knorm import Knorm
from tests.methods.naive import DTYPES, EXACT, SHAPES, Shape, check_scores, kept, length_of, observe


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_minus_the_norm(shape: Shape, dtype: torch.dtype) -> None:
    observation = observe(shape, dtype=dtype)
    keys = observation.keys.double().tolist()
    expected = [
        [
            [-math.sqrt(sum(x * x for x in keys[b][h][t])) for t in range(length_of(observation, b))]
            for h in range(shape.kv_heads)
        ]
        for b in range(shape.batch)
    ]
    check_scores(Knorm(), observation, expected, **EXACT)


def test_keys_that_are_not_numbers_go_first() -> None:
    observation = observe(Shape((9,), 1, 2, 4, 4))
    observation.keys[0, 0, 2] = math.inf
    observation.keys[0, 0, 5] = math.nan
    assert kept(Knorm().select(observation, Budget(8)), observation, 0, 0) == [0, 1, 2, 3, 4, 6, 7, 8]
    assert kept(Knorm().select(observation, Budget(7)), observation, 0, 0) == [0, 1, 3, 4, 6, 7, 8]


def test_of_equal_norms_the_later_stays() -> None:
    observation = observe(Shape((9,), 1, 1, 4, 4))
    observation.keys.fill_(1.0)
    observation.keys[0, 0, 1] = 0.5
    assert kept(Knorm().select(observation, Budget(4)), observation, 0, 0) == [1, 6, 7, 8]
