from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keepset.kernels.attention import HeadRun, ragged_attention

# Entries of every head of every request, [batch][kv_heads].
COUNTS = [
    pytest.param([[5]], id="one_head"),
    pytest.param([[4, 4, 4], [4, 4, 4]], id="dense"),
    pytest.param([[9, 9], [1, 1], [4, 4]], id="ragged_by_request"),
    pytest.param([[3, 8, 8], [8, 1, 6]], id="ragged_by_head"),
]
TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=1e-6),
    # Weights and outputs are rounded to bfloat16's 8 bits: of outputs below 4 that takes a few 2**-7.
    torch.bfloat16: dict(rtol=0.02, atol=0.03),
}


def runs_of(counts: list[int], keys: list[Tensor], values: list[Tensor], positions: list[Tensor]) -> list[HeadRun]:
    """Neighbouring heads with equal counts side by side, also across requests."""
    runs, first = [], 0
    for head in range(1, len(counts) + 1):
        if head == len(counts) or counts[head] != counts[first]:
            run = slice(first, head)
            runs.append(HeadRun(first, *(torch.stack(part[run]) for part in (keys, values, positions))))
            first = head
    return runs


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(("group", "head_dim", "value_dim"), [(1, 5, 5), (3, 8, 8), (8, 3, 7)])
@pytest.mark.parametrize("counts", COUNTS)
def test_matches_a_masked_softmax_over_all_positions(
    counts: list[list[int]], group: int, head_dim: int, value_dim: int, n: int, causal: bool, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(3)
    batch, kv_heads, length, scaling = len(counts), len(counts[0]), 12, 0.37
    keys = torch.randn(batch, kv_heads, length, head_dim, generator=draw).to(dtype)
    values = torch.randn(batch, kv_heads, length, value_dim, generator=draw).to(dtype)
    queries = torch.randn(batch, kv_heads * group, n, head_dim, generator=draw).to(dtype)
    # The first token always stays, so that every query sees something.
    kept = [
        [
            torch.cat([torch.zeros(1), 1 + torch.randperm(length - 1, generator=draw)])[:count].long().sort().values
            for count in heads
        ]
        for heads in counts
    ]
    query_positions = torch.stack([torch.arange(n) + length - n - request for request in range(batch)])

    expected = torch.zeros(batch, n, kv_heads * group, value_dim, dtype=torch.float64)
    for request in range(batch):
        for head in range(kv_heads * group):
            stays = torch.zeros(length, dtype=torch.bool)
            stays[kept[request][head // group]] = True
            for row in range(n):
                logits = keys[request, head // group].double() @ queries[request, head, row].double() * scaling
                hidden = ~stays | (torch.arange(length) > query_positions[request, row] if causal else False)
                weights = logits.masked_fill(hidden, float("-inf")).softmax(0)
                expected[request, row, head] = weights @ values[request, head // group].double()

    heads = [(request, head) for request in range(batch) for head in range(kv_heads)]
    runs = runs_of(
        [counts[b][h] for b, h in heads],
        [keys[b, h, kept[b][h]] for b, h in heads],
        [values[b, h, kept[b][h]] for b, h in heads],
        [kept[b][h] for b, h in heads],
    )
    output = ragged_attention(queries, runs, kv_heads, scaling, query_positions if causal else None)
    assert output.dtype == dtype and output.is_contiguous()
    torch.testing.assert_close(output.double(), expected, **TOLERANCE[dtype])
