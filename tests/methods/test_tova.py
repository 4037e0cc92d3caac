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
    keep_set = TOVA().select(observation, Budget(6, recent=TOVA().traits.recent))
    sets = [kept(keep_set, observation, 0, head) for head in range(3)]
    assert sets[0] == sets[1] == sets[2]
    assert sets[0][-1] == 22


def test_heads_that_hold_different_entries_go_by_their_own_queries() -> None:
    positions = torch.stack([torch.arange(20), torch.arange(0, 40, 2), torch.arange(20)])[None].repeat(2, 1, 1)
    positions[1] = torch.arange(20)
    observation = observe(
        Shape((20, 20), 3, 2, 5, 5), positions=positions, valid=torch.ones(2, 3, 20, dtype=torch.bool)
    )
    expected = []
    for request in range(2):
        rows = [window_attention(observation, request, head, 1)[-1] for head in range(6)]
        own = [[sum(pair) / 2 for pair in zip(*rows[2 * head : 2 * head + 2], strict=True)] for head in range(3)]
        everyones = [sum(row) / 6 for row in zip(*rows, strict=True)]
        expected.append(own if request == 0 else [everyones] * 3)
    check_scores(TOVA(), observation, expected, **tolerance(torch.float32))
