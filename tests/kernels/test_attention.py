"""Attention over packed heads, against a masked softmax that is written out head by head and query by query."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from keepset.kernels.attention import ragged_attention, ragged_log_sum_exp
from keepset.kernels.packed import HeadRun, PackedHeads

# Entries of every head of every request, [batch][kv_heads].
COUNTS = [
    pytest.param([[5]], id="one_head"),
    pytest.param([[4, 4, 4], [4, 4, 4]], id="dense"),
    pytest.param([[9, 9], [1, 1], [4, 4]], id="ragged_by_request"),
    pytest.param([[3, 8, 8], [8, 1, 6]], id="ragged_by_head"),
]
TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=1e-5),
    # Weights and outputs are rounded to bfloat16's 8 bits: of outputs below 4 that takes a few 2**-7.
    torch.bfloat16: dict(rtol=0.02, atol=0.03),
}


def packed_heads(counts: list[list[int]], sizes: tuple[int, int], dtype: torch.dtype, spare: int) -> PackedHeads:
    """Random entries, of ascending positions from 0; behind each head `spare` places that hold NaN."""
    draw = torch.Generator().manual_seed(3)
    runs, start = [], 0
    for head, count in enumerate(itertools.chain(*counts)):
        if runs and runs[-1].count == count:
            runs[-1].heads += 1
        else:
            runs.append(HeadRun(head, 1, start, count, count + spare))
        start += count + spare
    keys, values = (torch.randn(start, size, generator=draw).to(dtype) for size in sizes)
    positions = torch.zeros(start, dtype=torch.int32)
    for run in runs:
        for part in (keys, values):
            spared = part[run.start : run.start + run.heads * run.capacity].unflatten(0, (run.heads, run.capacity))
            spared[:, run.count :] = float("nan")
        # The first token always stays, so that every query sees something.
        for row in run.view(positions):
            later = 1 + torch.randperm(max(11, len(row)), generator=draw)
            row[1:] = later[: max(len(row) - 1, 0)].sort().values
    return PackedHeads(keys, values, positions, runs)


def expected(
    queries: Tensor, packed: PackedHeads, kv_heads: int, scaling: float, query_positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    batch, query_heads, n, _ = queries.shape
    group = query_heads // kv_heads
    heads = [
        tuple(
            None if flat is None else run.view(flat)[i]
            for flat in (packed.keys, packed.values, packed.positions, packed.bias)
        )
        for run in packed.runs
        for i in range(run.heads)
    ]
    output = torch.zeros(batch, n, query_heads, packed.values.shape[1], dtype=torch.float64)
    lse = torch.full((batch, n, query_heads), -math.inf, dtype=torch.float64)
    for request in range(batch):
        for head in range(query_heads):
            keys, values, positions, bias = heads[request * kv_heads + head // group]
            for row in range(n):
                logits = keys.double() @ queries[request, head, row].double() * scaling
                if bias is not None:
                    logits += bias.double()
                if query_positions is not None:
                    logits = logits[positions <= query_positions[request, row]]
                    values = heads[request * kv_heads + head // group][1][positions <= query_positions[request, row]]
                if len(logits):
                    output[request, row, head] = logits.softmax(0) @ values.double()
                    lse[request, row, head] = logits.exp().sum().log()
    return output, lse


@pytest.mark.cross
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(("group", "head_dim", "value_dim"), [(1, 5, 5), (3, 8, 8), (8, 3, 7)])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("biased", [False, True])
def test_is_a_masked_softmax_over_each_heads_entries(
    implementation: str,
    counts: list[list[int]],
    group: int,
    head_dim: int,
    value_dim: int,
    n: int,
    causal: bool,
    biased: bool,
    dtype: torch.dtype,
) -> None:
    batch, kv_heads, scaling = len(counts), len(counts[0]), 0.37
    packed = packed_heads(counts, (head_dim, value_dim), dtype, spare=2)
    draw = torch.Generator().manual_seed(4)
    if biased:
        bias = torch.randn(len(packed.keys), generator=draw)
        packed = replace(packed, bias=bias.to(dtype))
    # As models make them: token by token.
    queries = torch.randn(batch, n, kv_heads * group, head_dim, generator=draw).to(dtype).transpose(1, 2)
    # A part of a longer call's.
    positions = torch.stack([torch.arange(n + 1) + 12 - n - request for request in range(batch)])
    at = positions[:, :n] if causal else None
    output = ragged_attention(queries, [packed], scaling, at)
    assert output.dtype == dtype and output.is_contiguous()
    right, lse = expected(queries, packed, kv_heads, scaling, at)
    torch.testing.assert_close(output.double(), right, **TOLERANCE[dtype])
    measured = ragged_log_sum_exp(queries, [packed], scaling, at)
    torch.testing.assert_close(measured.double(), lse, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("longest", [257, pytest.param(5000, marks=pytest.mark.full)])
def test_a_long_head_in_parts(triton_interpreted: None, longest: int) -> None:
    """Heads without entries and with one beside it; what is not there counts nothing."""
    packed = packed_heads([[0, longest, 1], [64, 0, 65]], (16, 16), torch.float32, spare=1)
    queries = torch.randn(2, 6, 1, 16, generator=torch.Generator().manual_seed(1))
    right, lse = expected(queries, packed, 3, 0.3, None)
    torch.testing.assert_close(ragged_attention(queries, [packed], 0.3).double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ragged_log_sum_exp(queries, [packed], 0.3).double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "head_dim", [64, pytest.param(80, marks=pytest.mark.full), pytest.param(160, marks=pytest.mark.full)]
)
def test_many_new_queries_over_other_head_sizes(triton_interpreted: None, head_dim: int) -> None:
    packed = packed_heads([[12, 7]], (head_dim, head_dim), torch.bfloat16, spare=0)
    queries = torch.randn(1, 16, 9, head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    at = torch.arange(3, 12)[None]
    right, _ = expected(queries, packed, 2, head_dim**-0.5, at)
    output = ragged_attention(queries, [packed], head_dim**-0.5, at)
    torch.testing.assert_close(output.double(), right, **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_no_number_spoils_its_own_head_only(implementation: str, strange: float) -> None:
    packed = packed_heads([[4, 5]], (8, 8), torch.float32, spare=3)
    run = packed.runs[1]
    run.view(packed.keys)[0, 2] = strange
    queries = torch.ones(1, 4, 1, 8)
    output = ragged_attention(queries, [packed], 0.3)
    assert output[0, 0, :2].isfinite().all() and output[0, 0, 2:].isnan().all()


def test_grown_heads(triton_interpreted: None) -> None:
    """A table is written once: how much all heads have grown since is said by a number."""
    packed = packed_heads([[3, 8]], (8, 8), torch.float32, spare=2)
    queries = torch.randn(1, 2, 1, 8, generator=torch.Generator().manual_seed(1))
    before = ragged_attention(queries, [packed], 0.3)
    for run in packed.runs:
        run.behind(packed.keys, 1).fill_(0.7)
        run.behind(packed.values, 1).fill_(0.2)
        run.count += 1
    packed.grown += 1
    grown = ragged_attention(queries, [packed], 0.3)
    assert not torch.equal(grown, before)
    assert torch.equal(grown, ragged_attention(queries, [replace(packed, grown=0)], 0.3))


@pytest.mark.cross
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 10])
def test_heads_of_many_stores(implementation: str, head_dim: int, dtype: torch.dtype, n: int) -> None:
    """Some have grown since their table was written, some have a bias, one has places to spare."""
    counts = [[300, 7], [1, 1], [12, 40], [5, 5]]
    stores = [packed_heads([of_row], (head_dim, head_dim), dtype, spare=row) for row, of_row in enumerate(counts)]
    draw = torch.Generator().manual_seed(4)
    stores[2] = replace(stores[2], bias=torch.randn(len(stores[2].keys), generator=draw).to(dtype))
    for row in (1, 3):
        ragged_attention(torch.zeros(1, 4, 1, head_dim, dtype=dtype), [stores[row]], 0.3)
        for run in stores[row].runs:
            for column in (stores[row].keys, stores[row].values):
                column.copy_(torch.randn(column.shape, generator=draw))
            run.count += 1
        stores[row].grown += 1
    queries = torch.randn(4, n, 4, head_dim, generator=draw).to(dtype).transpose(1, 2)
    at = None if n == 1 else torch.tensor([[3, 4, 5]]).expand(4, -1).contiguous()
    together = ragged_attention(queries, stores, 0.3, at)
    lse = ragged_log_sum_exp(queries, stores, 0.3, at)
    for row, store in enumerate(stores):
        right, its_lse = expected(queries[row : row + 1], store, 2, 0.3, None if at is None else at[row : row + 1])
        torch.testing.assert_close(together[row : row + 1].double(), right, **TOLERANCE[dtype])
        torch.testing.assert_close(lse[row : row + 1].double(), its_lse, rtol=1e-4, atol=0.02)


def test_stores_of_two_kinds_are_not_read_as_one(triton_interpreted: None) -> None:
    stores = [packed_heads([[3, 8]], (8, 8), dtype, spare=0) for dtype in TOLERANCE]
    with pytest.raises(ValueError, match="Entries of one kind"):
        ragged_attention(torch.zeros(2, 2, 1, 8), stores, 0.3)
