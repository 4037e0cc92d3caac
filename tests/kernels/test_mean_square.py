"""What entries would receive, in blocks, against all of it at once."""

from __future__ import annotations

import pytest
import torch

from keepset.kernels import mean_square


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kv_heads, group, n, entries, size", [(1, 8, 5, 7, 10), (2, 3, 33, 20, 5), (3, 1, 1, 1, 4), (2, 2, 9, 300, 8)]
)
def test_blocks_change_nothing(
    implementation: str,
    monkeypatch: pytest.MonkeyPatch,
    kv_heads: int,
    group: int,
    n: int,
    entries: int,
    size: int,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(mean_square, "CACHE_BLOCK", 200)
    draw = torch.Generator().manual_seed(n)
    # Rotated in float32, from queries of the model's precision, to which kernels of a GPU round them again.
    queries = (torch.randn(kv_heads * group, n, size, generator=draw) * 2).to(dtype).float()
    keys = torch.randn(kv_heads, entries, size, generator=draw).to(dtype)
    facing = keys.double().repeat_interleave(group, 0)
    attention = (queries.double() @ facing.transpose(1, 2) * 0.7).softmax(-1)
    expected = attention.square().mean(1).float()
    torch.testing.assert_close(mean_square.mean_square_attention(queries, keys, 0.7), expected, rtol=1e-4, atol=1e-7)


def test_of_no_queries_nothing_is_received(implementation: str) -> None:
    assert mean_square.mean_square_attention(torch.zeros(4, 0, 3), torch.ones(2, 6, 3), 1.0).tolist() == [[0.0] * 6] * 4
