import pytest
import torch

from keepset import Budget
from keepset.methods.h2o import H2O
from tests.methods.naive import DTYPES, EXACT, SHAPES, SUM, Shape, check_scores, kept, length_of, observe, softmax


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_the_groups_column_sums(shape: Shape, dtype: torch.dtype) -> None:
    observation = observe(shape, dtype=dtype)
    columns = observation[SUM].double().tolist()
    group = range(shape.group)
    expected = [
        [
            [sum(columns[b][h * shape.group + g][t] for g in group) for t in range(length_of(observation, b))]
            for h in range(shape.kv_heads)
        ]
        for b in range(shape.batch)
    ]
    check_scores(H2O(), observation, expected, **EXACT)


def test_keeps_half_newest_half_heavy_hitters_of_the_whole_causal_attention() -> None:
    length, keep = 21, 9
    logits = torch.randn(length, length, generator=torch.Generator().manual_seed(1)).tolist()
    received = [0.0] * length
    for query in range(length):
        for entry, weight in enumerate(softmax(logits[query][: query + 1])):
            received[entry] += weight
    observation = observe(Shape((length,), 1, 1, 4, 4), features={SUM: torch.tensor([[received]])})

    newest = set(range(length - keep // 2, length))
    others = sorted(set(range(length)) - newest, key=lambda entry: received[entry], reverse=True)
    expected = sorted(newest | set(others[: keep - len(newest)]))
    assert kept(H2O().select(observation, Budget(keep)), observation, 0, 0) == expected


@pytest.mark.parametrize(
    ("keep", "share", "newest"),
    [(100, 0.29, 29), (200, 0.265, 53), (300, 0.21, 63), (7, 0.5, 3), (50, 0.0, 0), (50, 1.0, 50), (1, 0.9, 0)],
)
def test_the_newest_share_is_exact(keep: int, share: float, newest: int) -> None:
    falling = torch.arange(700.0, 0, -1).view(1, 1, -1)
    observation = observe(Shape((700,), 1, 1, 1, 1), features={SUM: falling})
    expected = [*range(keep - newest), *range(700 - newest, 700)]
    assert kept(H2O(recent_share=share).select(observation, Budget(keep)), observation, 0, 0) == expected
