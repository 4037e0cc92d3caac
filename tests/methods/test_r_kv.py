import math

import pytest
import torch

from keepset import Budget, KeepsetError, Observation, Recipe
from keepset.methods import r_kv
from keepset.methods.r_kv import RKV
from tests.methods.naive import (
    DTYPES,
    EXACT,
    ROUNDED_LOGITS,
    SHAPES,
    Shape,
    check_scores,
    dot,
    kept,
    length_of,
    observe,
    softmax,
)


def importance(observation: Observation, method: RKV, request: int, head: int, before: list[int]) -> list[float]:
    """From the attention of each query head and each query of the window to the entries before it."""
    assert observation.queries is not None
    group = observation.queries.shape[1] // observation.keys.shape[1]
    length = length_of(observation, request)
    keys = observation.keys[request, head, :length].double().tolist()
    count = min(method.window, observation.queries.shape[2], int(observation.lengths[request]))
    received = [0.0] * length
    for back in range(1, count + 1):
        queries = observation.queries[request, head * group : (head + 1) * group, -back].double().tolist()
        logits = [[dot(query, keys[entry]) * observation.scaling for entry in before] for query in queries]
        if method.group == "max":
            logits = [[max(column) for column in zip(*logits, strict=True)]]
        for row in logits:
            for entry, share in zip(before, softmax(row), strict=True):
                received[entry] += share / (len(logits) * count)
    half = method.kernel // 2
    return [max(received[max(0, entry - half) : entry + half + 1]) for entry in range(length)]


def redundancy(observation: Observation, method: RKV, request: int, head: int, before: list[int]) -> list[float]:
    """From the cosines between the keys before the window."""
    keys = [observation.keys[request, head, entry].double().tolist() for entry in before]
    unit = [[x / math.sqrt(dot(key, key)) for x in key] for key in keys]
    cosines = [[0.0 if i == j else dot(a, b) for j, b in enumerate(unit)] for i, a in enumerate(unit)]
    for row in cosines:
        similar = [j for j, cosine in enumerate(row) if cosine > method.threshold]
        if similar:
            row[similar[-1]] = 0.0
    redundant = softmax([sum(column) / len(keys) for column in zip(*cosines, strict=True)])
    return redundant + [0.0] * (length_of(observation, request) - len(before))


def naive_scores(observation: Observation, method: RKV, request: int, head: int) -> list[float]:
    newest = int(observation.lengths[request])
    positions = observation.positions[request, head, : length_of(observation, request)].tolist()
    before = [entry for entry, position in enumerate(positions) if position < newest - method.window]
    a = importance(observation, method, request, head, before)
    b = redundancy(observation, method, request, head, before)
    return [method.mix_lambda * x - (1 - method.mix_lambda) * y for x, y in zip(a, b, strict=True)]


METHODS = [
    RKV(window=3),
    RKV(kernel=1, mix_lambda=0.6),
    RKV(window=5, kernel=9, threshold=0.2),
    RKV(mix_lambda=1),
    RKV(window=3, mix_lambda=0.5, group="max"),
]


@pytest.mark.parametrize("block", [1, 60, r_kv._BLOCK])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_importance_less_redundancy(
    shape: Shape, method: RKV, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(r_kv, "_BLOCK", block)
    observation = observe(shape, dtype=dtype)
    expected = [[naive_scores(observation, method, r, h) for h in range(shape.kv_heads)] for r in range(shape.batch)]
    check_scores(method, observation, expected, **(EXACT if dtype == torch.float32 else ROUNDED_LOGITS))


def test_scores_of_a_cache_that_lost_entries_before() -> None:
    positions = torch.tensor([[[0, 1, 4, 5, 9, 12, 13, 14, 15], [0, 2, 3, 5, 6, 11, 13, 14, 15]]])
    observation = observe(Shape((9,), 2, 2, 6, 6), positions=positions, window=4)
    method = RKV(window=4, kernel=3, mix_lambda=0.5)
    check_scores(method, observation, [[naive_scores(observation, method, 0, head) for head in range(2)]], **EXACT)


def test_first_tokens_and_window_always_stay() -> None:
    observation = observe(Shape((30,), 2, 3, 8, 4))
    recipe = Recipe.parse("r_kv(keep=12)")
    for head in range(2):
        assert kept(recipe.select(observation), observation, 0, head) == [*range(4), *range(22, 30)]
    assert str(Recipe.parse("r_kv(keep=12, sinks=0)")) == "r_kv(keep=12, sinks=0)"


def test_keys_of_the_window_make_nothing_redundant() -> None:
    observation = observe(Shape((30,), 1, 1, 16, 4), window=4)
    method = RKV(window=4, mix_lambda=0)
    scores = method.score(observation)[..., :26]
    observation.keys[0, 0, 26:] = observation.keys[0, 0, 11].clone()
    torch.testing.assert_close(method.score(observation)[..., :26], scores, rtol=0, atol=0)


def test_of_keys_that_repeat_the_newest_stays() -> None:
    observation = observe(Shape((30,), 1, 1, 16, 4), window=2)
    observation.keys[0, 0, [3, 8, 13, 18, 23]] = observation.keys[0, 0, 3].clone()
    method = RKV(window=2, mix_lambda=0)
    positions = kept(method.select(observation, Budget(26, recent=2)), observation, 0, 0)
    assert {3, 8, 13, 18, 23} & set(positions) == {23}


def test_an_even_kernel_is_refused() -> None:
    with pytest.raises(KeepsetError, match="odd"):
        RKV(kernel=4)
