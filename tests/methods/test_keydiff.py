import math

import pytest
import torch

from keepset import Observation
from keepset.methods.keydiff import KeyDiff
from tests.methods.naive import DTYPES, EXACT, SHAPES, Shape, check_scores, dot, length_of, observe


def naive_scores(observation: Observation, request: int, head: int) -> list[float]:
    """Minus the cosine of each key to the mean of the normalised keys."""
    keys = observation.keys[request, head, : length_of(observation, request)].double().tolist()
    unit = [[x / math.sqrt(dot(key, key)) for x in key] for key in keys]
    anchor = [sum(column) / len(unit) for column in zip(*unit, strict=True)]
    return [-dot(key, anchor) / math.sqrt(dot(key, key) * dot(anchor, anchor)) for key in keys]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_minus_the_cosine_to_the_mean_direction(shape: Shape, dtype: torch.dtype) -> None:
    # Everything is computed in float32, whatever the cache's type: the tolerance is the same.
    observation = observe(shape, dtype=dtype)
    expected = [[naive_scores(observation, r, h) for h in range(shape.kv_heads)] for r in range(shape.batch)]
    check_scores(KeyDiff(), observation, expected, **{**EXACT, "rtol": 1e-4})


def test_a_keys_length_plays_no_part() -> None:
    observation = observe(Shape((19,), 2, 1, 6, 6))
    before = KeyDiff().score(observation)
    observation.keys[:, :, ::3] *= 50
    torch.testing.assert_close(KeyDiff().score(observation), before, **EXACT)


def test_the_key_that_points_elsewhere_is_the_best() -> None:
    observation = observe(Shape((12,), 1, 1, 4, 4))
    observation.keys[:] = 1 + observation.keys / 10
    observation.keys[0, 0, 5] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert KeyDiff().score(observation)[0, 0].argmax() == 5
