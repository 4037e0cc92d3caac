import pytest
import torch

from keepset import Budget, KeepsetError, Observation
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
    """Mean attention of the window over some KV heads' queries, averaged with its neighbours before the window."""
    assert observation.queries is not None
    group = observation.queries.shape[1] // observation.keys.shape[1]
    length = length_of(observation, request)
    positions = observation.positions[request, heads[0], :length].tolist()
    end = int(observation.lengths[request]) - method.window
    received = [0.0] * length
    for query_head in range(heads.start * group, heads.stop * group):
        for row in window_attention(observation, request, query_head, method.window):
            for entry in range(length):
                if positions[entry] < end:
                    received[entry] += row[entry] / (len(heads) * group * method.window)
    half = method.kernel // 2
    return [sum(received[max(0, e - half) : e + half + 1]) / method.kernel for e in range(length)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [RPC(window=3), RPC(window=8, kernel=1), RPC(window=5, kernel=9)])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_the_layers_pooled_mean_attention(shape: Shape, method: RPC, dtype: torch.dtype) -> None:
    observation, heads = observe(shape, dtype=dtype), range(shape.kv_heads)
    expected = [[naive_scores(observation, method, request, heads) for _ in heads] for request in range(shape.batch)]
    check_scores(method, observation, expected, **tolerance(dtype))


def test_heads_that_hold_different_entries_are_scored_by_themselves() -> None:
    different = [[0, 1, 4, 5, 9, 12, 13, 14, 15], [0, 2, 3, 5, 6, 11, 13, 14, 15]]
    positions = torch.tensor([different, [different[0]] * 2])
    observation = observe(Shape((9, 9), 2, 2, 6, 6), positions=positions, window=4)
    method = RPC(window=4, kernel=3)
    together = naive_scores(observation, method, 1, range(2))
    apart = [naive_scores(observation, method, 0, range(head, head + 1)) for head in range(2)]
    check_scores(method, observation, [apart, [together] * 2], **EXACT)


def test_all_heads_keep_the_same_entries_and_the_window() -> None:
    observation = observe(Shape((40,), 3, 2, 4, 4), window=5)
    method = RPC(window=5)
    keep_set = method.select(observation, Budget(13, recent=method.recent))
    first, *others = [kept(keep_set, observation, 0, head) for head in range(3)]
    assert others == [first, first] and first[-5:] == [35, 36, 37, 38, 39]


def test_an_even_kernel_is_refused() -> None:
    with pytest.raises(KeepsetError, match="odd"):
        RPC(kernel=4)
