import pytest
import torch

from keepset import Budget, KeepsetError, Observation
from keepset.methods.snapkv import SnapKV
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


def naive_scores(observation: Observation, method: SnapKV, request: int, head: int) -> list[float]:
    """Mean attention of the window's queries, each entry averaged with its neighbours before the window."""
    assert observation.queries is not None
    group = observation.queries.shape[1] // observation.keys.shape[1]
    length = length_of(observation, request)
    positions = observation.positions[request, head, :length].tolist()
    before_window = [p < int(observation.lengths[request]) - method.window for p in positions]
    received = [0.0] * length
    for member in range(group):
        for row in window_attention(observation, request, head * group + member, method.window):
            for entry in range(length):
                received[entry] += row[entry] / (group * method.window)
    pooled = []
    for entry in range(length):
        neighbours = range(entry - method.kernel // 2, entry + method.kernel // 2 + 1)
        pooled.append(sum(received[n] for n in neighbours if 0 <= n < length and before_window[n]) / method.kernel)
    return pooled


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [SnapKV(window=3), SnapKV(window=8, kernel=1), SnapKV(window=5, kernel=9)])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_the_windows_pooled_mean_attention(shape: Shape, method: SnapKV, dtype: torch.dtype) -> None:
    observation = observe(shape, dtype=dtype)
    expected = [
        [naive_scores(observation, method, request, head) for head in range(shape.kv_heads)]
        for request in range(shape.batch)
    ]
    check_scores(method, observation, expected, **tolerance(dtype))


def test_scores_of_a_cache_that_lost_entries_before() -> None:
    positions = torch.tensor([[[0, 1, 4, 5, 9, 12, 13, 14, 15], [0, 2, 3, 5, 6, 11, 13, 14, 15]]])
    observation = observe(Shape((9,), 2, 2, 6, 6), positions=positions, window=4)
    method = SnapKV(window=4, kernel=3)
    check_scores(method, observation, [[naive_scores(observation, method, 0, head) for head in range(2)]], **EXACT)


def test_the_window_stays() -> None:
    observation = observe(Shape((40,), 2, 2, 4, 4), window=5)
    method = SnapKV(window=5)
    keep_set = method.select(observation, Budget(9, recent=method.traits.recent))
    assert kept(keep_set, observation, 0, 1)[-5:] == [35, 36, 37, 38, 39]


def test_an_even_kernel_is_refused() -> None:
    with pytest.raises(KeepsetError, match="odd"):
        SnapKV(kernel=4)
