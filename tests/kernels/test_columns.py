from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from keepset.kernels import columns
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


class Called(TorchDispatchMode):
    """The fused operators that are called, with the sizes of the heads that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            # What PyTorch's checks ask of them, which tensors without data do not go through.
            assert len({x.shape[1] for x in args[:3]}) == 1 and all(x.stride(-1) == 1 for x in args[:3])
            self.operators.append((name, [x.shape[-1] for x in args[:3]]))
        return function(*args, **(kwargs or {}))


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    ("dtype", "sizes", "modern", "operator"),
    [
        (torch.bfloat16, (128, 128), True, (FLASH, [128, 128, 128])),
        (torch.bfloat16, (10, 10), True, (FLASH, [16, 16, 16])),
        (torch.float16, (80, 80), False, (EFFICIENT, [80, 80, 80])),
        (torch.bfloat16, (100, 60), True, (EFFICIENT, [104, 104, 64])),
        (torch.float32, (30, 30), True, (EFFICIENT, [32, 32, 32])),
        (torch.bfloat16, (264, 264), True, (EFFICIENT, [264, 264, 264])),
        (torch.bfloat16, (64, 64), False, None),
        (torch.float64, (64, 64), True, None),
    ],
)
@pytest.mark.parametrize("n", [1, 37])
def test_operators_that_a_gpu_is_given(
    n: int,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    modern: bool,
    operator: tuple[str, list[int]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is computed: tensors without data, of a GPU, by PyTorch's own rules for the shapes of what comes back."""
    monkeypatch.setattr(columns, "has_bfloat16", lambda device: modern)
    monkeypatch.setattr(columns, "log_sum_exp", lambda queries, *_: queries.new_empty(8, n, dtype=torch.float32))
    with FakeTensorMode(), Called() as called:
        # Queries as models make them, token by token; each KV head's group is two.
        queries = torch.empty(n, 8, sizes[0], dtype=dtype, device="cuda").transpose(0, 1)
        keys, values = (torch.empty(4, n, size, dtype=dtype, device="cuda") for size in sizes)
        output, lse = attention_with_lse(queries, keys, values, SCALING)
    assert (output.shape, output.dtype) == ((8, n, sizes[1]), dtype)
    assert (lse.shape, lse.dtype) == ((8, n), torch.float32)
    assert [each for each in called.operators if each[0] in (FLASH, EFFICIENT)] == ([operator] if operator else [])


def test_what_an_operator_pads_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are padded to what it takes, and what it gives is cut: on a CPU's operator that pads as a GPU's does."""

    def padding(query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float) -> tuple[Tensor, Tensor]:
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] == 16
        output, lse = columns._flash_on_cpu(query, key, value, causal, scaling)
        return Posing(output), Posing(torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf")))

    pytest.importorskip("triton")
    from tests.posing import Gpu, Posing

    operator = lambda q, k, v, *rest: padding(q.held, k.held, v.held, *rest)  # noqa: E731
    monkeypatch.setattr(columns, "_fused_operator", lambda *_: operator)
    queries, keys = tensors(37, 37, 2, 3, 10, torch.float32)
    values = torch.randn(2, 37, 10, generator=torch.Generator().manual_seed(1))
    with Gpu(monkeypatch):
        output, lse = attention_with_lse(Posing(queries), Posing(keys), Posing(values), SCALING)
    assert isinstance(output, Posing) and isinstance(lse, Posing)
    attention, expected_lse = dense(queries, keys)
    expected = attention @ values.double().repeat_interleave(3, 0)
    torch.testing.assert_close(output.held.double(), expected, **EXACT)
    torch.testing.assert_close(lse.held.double(), expected_lse, **EXACT)


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
