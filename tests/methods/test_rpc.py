import pytest
import torch

from keepset import KeepsetError, Observation, Recipe
from keepset.methods.rpc import RPC
from tests.methods.naive import (
    DTYPES,
    EXACT,
    SHAPES,
    Shape,
    check_scores,
    kept,
    length_of,
    observe,
    tolerance,
    window_attention,
)


def naive_scores(observation: Observation, method: RPC, request: int, heads: range) -> list[float]:
    """Mean attention of the window over some KV heads' queries, averaged with its neighbours."""
    assert observation.queries is not None
    group = observation.queries.shape[1] // observation.keys.shape[1]
    received = [0.0] * length_of(observation, request)
    for query_head in range(heads.start * group, heads.stop * group):
        for row in window_attention(observation, request, query_head, method.window):
            for entry, weight in enumerate(row):
                received[entry] += weight / (len(heads) * group * method.window)
    half = method.kernel // 2
    return [sum(received[max(0, e - half) : e + half + 1]) / method.kernel for e in range(len(received))]


def of_each_head(observation: Observation, method: RPC, request: int) -> list[list[float]]:
    heads = range(observation.keys.shape[1])
    return [naive_scores(observation, method, request, range(head, head + 1)) for head in heads]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [RPC(window=3), RPC(window=8, kernel=1), RPC(window=5, kernel=9)])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_each_kv_heads_pooled_mean_attention(shape: Shape, method: RPC, dtype: torch.dtype) -> None:
    observation = observe(shape, dtype=dtype)
    expected = [of_each_head(observation, method, request) for request in range(shape.batch)]
    check_scores(method, observation, expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_heads_of_the_layer_can_be_averaged(shape: Shape, dtype: torch.dtype) -> None:
    method, observation, heads = RPC(window=5, aggregation="all"), observe(shape, dtype=dtype), range(shape.kv_heads)
    expected = [[naive_scores(observation, method, request, heads) for _ in heads] for request in range(shape.batch)]
    check_scores(method, observation, expected, **tolerance(dtype))


def test_heads_that_hold_different_entries_are_scored_by_themselves() -> None:
    different = [[0, 1, 4, 5, 9, 12, 13, 14, 15], [0, 2, 3, 5, 6, 11, 13, 14, 15]]
    positions = torch.tensor([different, [different[0]] * 2])
    observation = observe(Shape((9, 9), 2, 2, 6, 6), positions=positions, window=4)
    method = RPC(window=4, kernel=3, aggregation="all")
    together = naive_scores(observation, method, 1, range(2))
    check_scores(method, observation, [of_each_head(observation, method, 0), [together] * 2], **EXACT)


def test_first_tokens_and_window_always_stay() -> None:
    observation = observe(Shape((40,), 3, 2, 4, 4), window=5)
    keep_set = Recipe.of(RPC(window=5), keep=9).select(observation)
    for head in range(3):
        assert kept(keep_set, observation, 0, head) == [0, 1, 2, 3, 35, 36, 37, 38, 39]


def test_heads_keep_their_own_entries_unless_all_are_averaged() -> None:
    observation = observe(Shape((40,), 3, 2, 4, 4), window=5)
    for aggregation, choices in (("group", 3), ("all", 1)):
        keep_set = Recipe.of(RPC(window=5, aggregation=aggregation), keep=20).select(observation)
        assert len({tuple(kept(keep_set, observation, 0, head)) for head in range(3)}) == choices


def test_an_even_kernel_is_refused() -> None:
    with pytest.raises(KeepsetError, match="odd"):
        RPC(kernel=4)
