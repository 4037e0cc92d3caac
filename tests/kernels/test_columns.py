from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keepset.kernels.columns import ColumnAccumulator, attention_columns, attention_with_lse, log_sum_exp

SIZES = [1, 2, 63, 64, 65, 127, 128, 129, 200]  # around one and two chunks of queries
HEADS = [pytest.param(2, 1, 5, id="mha"), pytest.param(2, 3, 8, id="gqa"), pytest.param(1, 8, 3, id="mqa")]
SCALING = 0.3
NAMES = ["sum", "max", "square"]

EXACT = dict(rtol=1e-4, atol=1e-5)
ROUNDED_LOGITS = dict(rtol=0.02, atol=1e-4)
"""A product rounded to bfloat16 is off by 2**-9 of itself; scaled it is below 5, so a weight by 1 %."""
ROUNDED_OUTPUT = dict(rtol=0.02, atol=0.03)
"""Weights, too, are rounded to bfloat16, and so is the output."""


def twice(rounding: dict[str, float]) -> dict[str, float]:
    """Of a square, the relative error of its root counts twice."""
    return {name: 2 * bound for name, bound in rounding.items()}


def tensors(
    n: int, entries: int, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Queries of the last `n` entries, and all keys."""
    draw = torch.Generator().manual_seed(n * 1000 + entries)
    queries = torch.randn(kv_heads * group, n, head_dim, generator=draw)
    keys = torch.randn(kv_heads, entries, head_dim, generator=draw)
    return queries.to(dtype), keys.to(dtype)


def dense(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Attention as a whole matrix `[query_heads, n, entries]`, and the log of its denominators, float64."""
    group, n, entries = queries.shape[0] // keys.shape[0], queries.shape[1], keys.shape[1]
    attention, lse = [], []
    for head, rows in enumerate(queries.double()):
        logits = rows @ keys[head // group].double().T * SCALING
        for row in range(n):
            logits[row, entries - n + row + 1 :] = float("-inf")
        powers = logits.exp()
        lse.append(powers.sum(1).log())
        attention.append(powers / powers.sum(1, keepdim=True))
    return torch.stack(attention), torch.stack(lse)


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), HEADS)
@pytest.mark.parametrize("value_dim", [0, 3], ids=["square", "other_value_size"])
@pytest.mark.parametrize("n", SIZES)
def test_attention_with_its_log_sum_exp(n: int, value_dim: int, kv_heads: int, group: int, head_dim: int) -> None:
    queries, keys = tensors(n, n, kv_heads, group, head_dim, torch.float32)
    values = torch.randn(kv_heads, n, head_dim + value_dim, generator=torch.Generator().manual_seed(n))
    output, lse = attention_with_lse(queries, keys, values, SCALING)
    attention, expected_lse = dense(queries, keys)
    expected = attention @ values.double().repeat_interleave(group, 0)
    torch.testing.assert_close(output.double(), expected, **EXACT)
    torch.testing.assert_close(lse.double(), expected_lse, **EXACT)


@pytest.mark.parametrize("value_dim", [8, 5])
@pytest.mark.parametrize("n", [1, 65, 129])
def test_attention_with_its_log_sum_exp_in_bfloat16(n: int, value_dim: int) -> None:
    queries, keys = tensors(n, n, 2, 3, 8, torch.bfloat16)
    values = torch.randn(2, n, value_dim, generator=torch.Generator().manual_seed(n)).bfloat16()
    output, lse = attention_with_lse(queries, keys, values, SCALING)
    attention, expected_lse = dense(queries, keys)
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    expected = attention @ values.double().repeat_interleave(3, 0)
    torch.testing.assert_close(output.double(), expected, **ROUNDED_OUTPUT)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=0.02)


@pytest.mark.cross
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), HEADS)
@pytest.mark.parametrize("past", [0, 1, 70])
@pytest.mark.parametrize("n", SIZES)
def test_statistics_of_the_newest_queries_columns(
    implementation: str, n: int, past: int, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    queries, keys = tensors(n, n + past, kv_heads, group, head_dim, dtype)
    attention, lse = dense(queries, keys)
    rounding = EXACT if dtype == torch.float32 else ROUNDED_LOGITS
    torch.testing.assert_close(
        log_sum_exp(queries, keys, SCALING).double(), lse, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02
    )
    # As attention gives it, token by token.
    by_token = lse.float().T.contiguous().T
    statistics = attention_columns(queries, keys, scaling=SCALING, names=NAMES, lse=by_token)
    assert {name: column.dtype for name, column in statistics.items()} == dict.fromkeys(NAMES, torch.float32)
    torch.testing.assert_close(statistics["sum"].double(), attention.sum(1), **rounding)
    torch.testing.assert_close(statistics["max"].double(), attention.amax(1), **rounding)
    torch.testing.assert_close(statistics["square"].double(), attention.square().sum(1), **twice(rounding))


@pytest.mark.parametrize("rule", ["each", "sum", "mean", "max"])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), HEADS)
def test_statistics_of_a_query_group(implementation: str, kv_heads: int, group: int, head_dim: int, rule: str) -> None:
    queries, keys = tensors(9, 70, kv_heads, group, head_dim, torch.float32)
    attention, _ = dense(queries, keys)
    statistics = attention_columns(queries, keys, scaling=SCALING, names=NAMES, group=rule)
    for name, each in (("sum", attention.sum(1)), ("max", attention.amax(1)), ("square", attention.square().sum(1))):
        heads = [each[head * group : (head + 1) * group] for head in range(kv_heads)]
        combine = {"sum": lambda x: x.sum(0), "mean": lambda x: x.mean(0), "max": lambda x: x.amax(0)}
        expected = each if rule == "each" else torch.stack([combine[rule](head) for head in heads])
        torch.testing.assert_close(statistics[name].double(), expected, **EXACT)


@pytest.mark.parametrize(("n", "entries"), [(1, 1), (70, 5), (5, 70)])
def test_statistics_of_queries_after_all_entries(implementation: str, n: int, entries: int) -> None:
    draw = torch.Generator().manual_seed(n)
    queries, keys = torch.randn(6, n, 5, generator=draw), torch.randn(2, entries, 5, generator=draw)
    logits = torch.stack([queries[head].double() @ keys[head // 3].double().T * SCALING for head in range(6)])
    attention = logits.softmax(-1)
    lse = log_sum_exp(queries, keys, SCALING, causal=False)
    torch.testing.assert_close(lse.double(), logits.exp().sum(-1).log(), **EXACT)
    statistics = attention_columns(queries, keys, scaling=SCALING, names=NAMES, causal=False)
    torch.testing.assert_close(statistics["sum"].double(), attention.sum(1), **EXACT)
    torch.testing.assert_close(statistics["max"].double(), attention.amax(1), **EXACT)
    torch.testing.assert_close(statistics["square"].double(), attention.square().sum(1), **EXACT)


def test_of_no_queries_nothing_is_received(implementation: str) -> None:
    for rule, heads in (("each", 4), ("mean", 2)):
        of_none = attention_columns(torch.zeros(4, 0, 3), torch.ones(2, 6, 3), names=NAMES, group=rule)
        assert all(column.tolist() == [[0.0] * 6] * heads for column in of_none.values())


@pytest.mark.parametrize("names", [["sum"], ["max"], ["square"], []])
def test_only_what_is_asked_for_is_computed(implementation: str, names: list[str]) -> None:
    queries, keys = tensors(130, 150, 2, 2, 4, torch.float32)
    lse = dense(queries, keys)[1].float()
    every = attention_columns(queries, keys, names=NAMES, lse=lse)
    some = attention_columns(queries, keys, names=names, lse=lse)
    assert list(some) == names
    for name in names:
        torch.testing.assert_close(some[name], every[name])


@pytest.mark.parametrize("with_lse", [True, False])
def test_chunks_of_a_prompt_add_up_to_the_whole(with_lse: bool) -> None:
    queries, keys = tensors(200, 200, 2, 2, 4, torch.float32)
    attention, lse = dense(queries, keys)
    columns = ColumnAccumulator({"sum", "max"})
    for start, stop in ((0, 0), (0, 1), (1, 90), (90, 91), (91, 91), (91, 200)):
        known = lse[:, start:stop].float() if with_lse else None
        columns.add(queries[:, start:stop], keys[:, :stop], SCALING, known)
    torch.testing.assert_close(columns.statistics["sum"].double(), attention.sum(1), **EXACT)
    torch.testing.assert_close(columns.statistics["max"].double(), attention.amax(1), **EXACT)


def test_inputs_are_left_as_they_are() -> None:
    queries, keys = tensors(130, 140, 1, 2, 4, torch.float32)
    lse = dense(queries, keys)[1].float()
    copies = [tensor.clone() for tensor in (queries, keys, lse)]
    attention_columns(queries, keys, names=NAMES, lse=lse)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((queries, keys, lse), copies, strict=True))
