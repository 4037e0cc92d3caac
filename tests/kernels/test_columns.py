"""Statistics of attention's columns, and its log-sum-exp, against the whole matrix in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from keepset.core.feature import Chunk
from keepset.core.features.attention import AttentionColumns
from keepset.kernels import columns
from keepset.kernels.columns import ColumnStatistic, attention_columns, attention_with_lse
from keepset.kernels.softmax import Softmax
from tests.kernels.test_attention import other_softmax, seeded
from tests.on_gpu import pretends

SIZES = [1, 63, 64, 65, 129, 200]  # around one and two chunks of queries
HEADS = [pytest.param(2, 1, 5, id="mha"), pytest.param(2, 3, 8, id="gqa"), pytest.param(1, 8, 3, id="mqa")]
SCALING = 0.3
PLAIN = Softmax(SCALING)
NAMES = ["sum", "max", "square"]

EXACT = dict(rtol=1e-4, atol=1e-5)
ROUNDED_LOGITS = dict(rtol=0.02, atol=1e-4)
"""A product rounded to bfloat16 is off by 2**-9 of itself; scaled it is below 5, so a weight by 1 %."""
ROUNDED_OUTPUT = dict(rtol=0.02, atol=0.03)
"""Weights, too, are rounded to bfloat16, and so is the output."""


def tensors(
    n: int, entries: int, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Queries of the last `n` entries, and all keys."""
    draw = seeded(n * 1000 + entries)
    queries = torch.randn(kv_heads * group, n, head_dim, generator=draw)
    keys = torch.randn(kv_heads, entries, head_dim, generator=draw)
    return queries.to(dtype), keys.to(dtype)


def dense(queries: Tensor, keys: Tensor, causal: bool = True, softmax: Softmax = PLAIN) -> tuple[Tensor, Tensor]:
    """Attention as a whole matrix `[query_heads, n, entries]`, and the log of its denominators, float64."""
    group, n, entries = queries.shape[0] // keys.shape[0], queries.shape[1], keys.shape[1]
    attention, lse = [], []
    for head, rows in enumerate(queries.double()):
        logits = rows @ keys[head // group].double().T * SCALING
        if softmax.softcap is not None:
            logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
        for row in range(n if causal else 0):
            logits[row, entries - n + row + 1 :] = float("-inf")
        powers = logits.exp()
        whole = powers.sum(1) if softmax.sinks is None else powers.sum(1) + softmax.sinks[head].double().exp()
        lse.append(whole.log())
        attention.append(powers / whole[:, None])
    return torch.stack(attention), torch.stack(lse)


def of_matrix(attention: Tensor) -> dict[str, Tensor]:
    """The statistics of each column."""
    return {"sum": attention.sum(1), "max": attention.amax(1), "square": attention.square().sum(1)}


def check(statistics: dict[str, Tensor], right: dict[str, Tensor], rounding: dict[str, float] = EXACT) -> None:
    assert {name: column.dtype for name, column in statistics.items()} == dict.fromkeys(right, torch.float32)
    for name, column in statistics.items():
        # Of a square, the relative error of its root counts twice, unless nothing is rounded.
        times = 2 if name == "square" and rounding is not EXACT else 1
        bounds = {bound: times * size for bound, size in rounding.items()}
        torch.testing.assert_close(column.double(), right[name], **bounds)


def check_columns(queries: Tensor, keys: Tensor, causal: bool = True, softmax: Softmax = PLAIN) -> None:
    """The log-sum-exp, and with it and without it the statistics, are those of the whole matrix."""
    attention, lse = dense(queries, keys, causal, softmax)
    exact = keys.dtype == torch.float32
    computed = columns.log_sum_exp(queries, keys, softmax, causal).double()
    torch.testing.assert_close(computed, lse, rtol=0, atol=1e-5 if exact else 0.02)
    # As attention gives it, token by token.
    for given_lse in [lse.float().T.contiguous().T, *[None] * exact]:
        statistics = attention_columns(queries, keys, softmax=softmax, names=NAMES, causal=causal, lse=given_lse)
        check(statistics, of_matrix(attention), EXACT if exact else ROUNDED_LOGITS)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "value_dim", "n", "dtype"),
    [
        *((*heads.values, value_dim, n, torch.float32) for heads in HEADS for value_dim in (0, 3) for n in SIZES),
        *((2, 3, 8, value_dim, n, torch.bfloat16) for value_dim in (0, -3) for n in (1, 65, 129)),
    ],
)
def test_attention_with_its_log_sum_exp(
    kv_heads: int, group: int, head_dim: int, value_dim: int, n: int, dtype: torch.dtype
) -> None:
    """Values have so many more numbers than keys."""
    queries, keys = tensors(n, n, kv_heads, group, head_dim, dtype)
    values = torch.randn(kv_heads, n, head_dim + value_dim, generator=seeded(n)).to(dtype)
    output, lse = attention_with_lse(queries, keys, values, Softmax(SCALING))
    attention, expected_lse = dense(queries, keys)
    exact = dtype == torch.float32
    assert (output.dtype, lse.dtype) == (dtype, torch.float32)
    expected = attention @ values.double().repeat_interleave(group, 0)
    torch.testing.assert_close(output.double(), expected, **(EXACT if exact else ROUNDED_OUTPUT))
    torch.testing.assert_close(lse.double(), expected_lse, **(EXACT if exact else dict(rtol=0, atol=0.02)))


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


@pretends
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
    n: int, dtype: torch.dtype, sizes: tuple[int, int], modern: bool, operator: tuple[str, list[int]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nothing is computed: tensors without data, of a GPU, by PyTorch's own rules for the shapes of what comes back."""
    monkeypatch.setattr(columns, "has_bfloat16", lambda device: modern)
    monkeypatch.setattr(columns, "log_sum_exp", lambda queries, *_: queries.new_empty(8, n, dtype=torch.float32))
    with FakeTensorMode(), Called() as called:
        # Queries as models make them, token by token; each KV head's group is two.
        queries = torch.empty(n, 8, sizes[0], dtype=dtype, device="cuda").transpose(0, 1)
        keys, values = (torch.empty(4, n, size, dtype=dtype, device="cuda") for size in sizes)
        output, lse = attention_with_lse(queries, keys, values, Softmax(SCALING))
    assert (output.shape, output.dtype) == ((8, n, sizes[1]), dtype)
    assert (lse.shape, lse.dtype) == ((8, n), torch.float32)
    assert [call for call in called.operators if call[0] in (FLASH, EFFICIENT)] == ([operator] if operator else [])


@pretends
def test_what_an_operator_pads_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are padded to what it takes, and what it gives is cut: on a CPU's operator that pads as a GPU's does."""
    pytest.importorskip("triton")
    from tests.posing import Gpu, Posing

    def padding(query: Posing, key: Posing, value: Posing, *options: Any, scale: float) -> tuple[Tensor, Tensor]:
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] == 16
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = operator(query.held, key.held, value.held, *options, scale=scale)
        return Posing(output), Posing(torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf")))

    monkeypatch.setattr(columns, "_fused_operator", lambda *_: (padding, [0.0]))
    queries, keys = tensors(37, 37, 2, 3, 10, torch.float32)
    values = torch.randn(2, 37, 10, generator=seeded(1))
    with Gpu(monkeypatch):
        output, lse = attention_with_lse(Posing(queries), Posing(keys), Posing(values), Softmax(SCALING))
    assert isinstance(output, Posing) and isinstance(lse, Posing)
    attention, expected_lse = dense(queries, keys)
    torch.testing.assert_close(output.held.double(), attention @ values.double().repeat_interleave(3, 0), **EXACT)
    torch.testing.assert_close(lse.held.double(), expected_lse, **EXACT)


@pytest.mark.few
@pytest.mark.cross
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), HEADS)
@pytest.mark.parametrize("past", [0, 1, 70])
@pytest.mark.parametrize("n", SIZES)
def test_statistics_of_the_newest_queries_columns(
    implementation: str, n: int, past: int, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    check_columns(*tensors(n, n + past, kv_heads, group, head_dim, dtype))


@pytest.mark.few
@pytest.mark.cross
@pytest.mark.parametrize("kind", [1, 2, 3])
@pytest.mark.parametrize("value_dim", [8, 5])
def test_caps_and_sinks(implementation: str, value_dim: int, kind: int) -> None:
    queries, keys = tensors(70, 70, 2, 3, 8, torch.float32)
    queries, softmax = 2 * queries, replace(other_softmax(6)[kind], scaling=SCALING)
    attention, lse = dense(queries, keys, softmax=softmax)
    values = torch.randn(2, 70, value_dim, generator=seeded(1))
    output, computed_lse = attention_with_lse(queries, keys, values, softmax)
    torch.testing.assert_close(output.double(), attention @ values.double().repeat_interleave(3, 0), **EXACT)
    torch.testing.assert_close(computed_lse.double(), lse, **EXACT)
    check_columns(queries, keys, softmax=softmax)
    later, _ = dense(queries, keys, causal=False, softmax=softmax)
    squares = columns.mean_square_attention(queries, keys, softmax)
    torch.testing.assert_close(squares, later.square().mean(1).float(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("n", "entries"), [(1, 1), (70, 5), (5, 70)])
def test_statistics_of_queries_after_all_entries(implementation: str, n: int, entries: int) -> None:
    check_columns(*tensors(n, entries, 2, 3, 5, torch.float32), causal=False)


@pytest.mark.parametrize("causal", [True, False])
def test_few_queries_over_many_entries(triton_interpreted: None, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device has room for more programs than there are queries, entries are cut into parts."""
    monkeypatch.setattr("keepset.kernels.dispatch.processors", lambda device: 64)
    check_columns(*tensors(9, 700, 1, 3, 5, torch.float32), causal)


def test_of_no_queries_nothing_is_received(implementation: str) -> None:
    none, keys = torch.zeros(4, 0, 3), torch.ones(2, 6, 3)
    received = attention_columns(none, keys, softmax=Softmax(1.0), names=NAMES)
    assert all(column.tolist() == [[0.0] * 6] * 4 for column in received.values())
    assert columns.mean_square_attention(none, keys, Softmax(1.0)).tolist() == [[0.0] * 6] * 4


@pytest.mark.parametrize("names", [["sum"], ["max"], ["square"], []])
def test_only_what_is_asked_for_is_computed(implementation: str, names: list[str]) -> None:
    """And inputs are left as they are."""
    queries, keys = tensors(70, 90, 2, 2, 4, torch.float32)
    attention, exact_lse = dense(queries, keys)
    lse = exact_lse.float()
    copies = [tensor.clone() for tensor in (queries, keys, lse)]
    statistics = attention_columns(queries, keys, softmax=Softmax(SCALING), names=names, lse=lse)
    right = of_matrix(attention)
    check(statistics, {name: right[name] for name in names})
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((queries, keys, lse), copies, strict=True))


@pytest.mark.parametrize("with_lse", [True, False])
def test_chunks_of_a_prompt_add_up_to_the_whole(with_lse: bool) -> None:
    queries, keys = tensors(200, 200, 2, 2, 4, torch.float32)
    attention, lse = dense(queries, keys)
    features = [AttentionColumns(ColumnStatistic.SUM), AttentionColumns(ColumnStatistic.MAX)]
    accumulated = AttentionColumns.accumulator(features)

    def chunk(start: int, stop: int) -> Chunk:
        chunk_lse = [lse[:, start:stop].float()] if with_lse else None
        chunk_queries, positions = queries[None, :, start:stop], torch.arange(start, stop)[None]
        return Chunk(
            chunk_queries, lambda: [(keys[:, :stop], slice(None))], positions, None, Softmax(SCALING), chunk_lse
        )

    for start, stop in ((0, 0), (0, 1), (1, 90), (90, 91), (91, 91), (91, 200)):
        accumulated.add(chunk(start, stop))
    right = of_matrix(attention)
    for feature, values in accumulated.values(torch.tensor([200]), 0).items():
        check({feature.statistic: values[0]}, {feature.statistic: right[feature.statistic]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kv_heads", "group", "n", "entries", "size"),
    [(1, 8, 5, 7, 10), (2, 3, 33, 20, 5), (3, 1, 1, 1, 4), (2, 2, 9, 300, 8)],
)
def test_mean_squares_in_blocks(
    implementation: str, monkeypatch: pytest.MonkeyPatch, kv_heads: int, group: int, n: int, entries: int, size: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    monkeypatch.setattr(columns, "CACHE_BLOCK", 200)
    # Rotated in float32, from queries of the model's precision, to which kernels of a GPU round them again.
    queries, keys = tensors(n, entries, kv_heads, group, size, dtype)
    attention, _ = dense(2 * queries, keys, causal=False)
    squares = columns.mean_square_attention(2 * queries.float(), keys, Softmax(SCALING))
    torch.testing.assert_close(squares, attention.square().mean(1).float(), rtol=1e-4, atol=1e-7)
