import pytest
import torch

from keepset import Budget
from keepset.methods.tova import TOVA
from tests.methods.naive import (
    DTYPES,
    SHAPES,
    Shape,
    check_scores,
    kept,
    length_of,
    observe,
    tolerance,
    window_attention,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_the_newest_querys_attention_averaged_over_the_layers_heads(
    shape: Shape, dtype: torch.dtype
) -> None:
    observation = observe(shape, dtype=dtype)
    expected = []
    for request in range(shape.batch):
        query_heads = shape.kv_heads * shape.group
        rows = [window_attention(observation, request, head, 1)[-1] for head in range(query_heads)]
        mean = [sum(row[t] for row in rows) / query_heads for t in range(length_of(observation, request))]
        expected.append([mean] * shape.kv_heads)
    check_scores(TOVA(), observation, expected, **tolerance(dtype))


def test_heads_share_one_set_which_holds_the_newest_token() -> None:
    observation = observe(Shape((23,), 3, 2, 5, 5))
    keep_set = TOVA().select(observation, Budget(6, recent=TOVA().recent))
    sets = [kept(keep_set, observation, 0, head) for head in range(3)]
    assert sets[0] == sets[1] == sets[2]
    assert sets[0][-1] == 22
