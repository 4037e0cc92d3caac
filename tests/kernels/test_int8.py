"""Rows in 8 bits, and kernels that read and write them, against the same rows written out in floating point."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from keepset.kernels.attention import append_entries, ragged_attention, ragged_log_sum_exp
from keepset.kernels.int8 import dequantize, quantize
from keepset.kernels.packed import PackedHeads
from keepset.kernels.window import add_received
from tests.kernels.test_attention import TOLERANCE, expected, packed_heads
from tests.kernels.test_window import expected as expected_sums

ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Of a number, in parts of it: the largest of a row is 127 steps, so that it is that much further from them."""


@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_number_is_within_half_a_step(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 40, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[0, :10] *= torch.logspace(-1, 3, 10)[:, None].to(dtype)
    whole, scale = quantize(rows)
    assert whole.dtype == torch.int8 and scale.dtype == dtype and scale.shape == rows.shape[:2]
    for row, numbers, step in zip(rows.flatten(0, 1), whole.flatten(0, 1), scale.flatten().tolist(), strict=True):
        largest = max(map(abs, row.tolist()))
        assert step == pytest.approx(largest / 127, rel=ROUNDING[dtype])
        for number, integer in zip(row.tolist(), numbers.tolist(), strict=True):
            assert abs(integer) <= 127 and abs(integer * step - number) <= step * (0.5 + 127 * ROUNDING[dtype])
    again, _ = quantize(dequantize(whole, scale))
    assert (again == whole).float().mean() > 0.999


def test_rows_of_nothing_and_of_no_number() -> None:
    rows = torch.tensor([[0.0, 0.0], [1e-42, 0.0], [math.nan, 1.0], [math.inf, 1.0], [-3.0, 1.5]])
    again = dequantize(*quantize(rows))
    assert not again[:2].any() and again[2:4].isnan().all()
    assert again[4].tolist() == pytest.approx([-3.0, 3.0 * 64 / 127])
    assert quantize(rows[:0])[0].shape == (0, 2)


def in_8_bits(packed: PackedHeads) -> tuple[PackedHeads, PackedHeads]:
    """The same heads in 8 bits, and as floating-point numbers, product by product."""
    (keys, key_scale), (values, value_scale) = quantize(packed.keys), quantize(packed.values)
    stored = replace(packed, keys=keys, values=values, key_scale=key_scale, value_scale=value_scale)
    written = [torch.stack([row * step for row, step in zip(*part, strict=True)]) for part in (
        (keys.double(), key_scale.double()), (values.double(), value_scale.double()))]  # fmt: skip
    return stored, replace(packed, keys=written[0], values=written[1])


@pytest.mark.parametrize("n", [4, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("dtype", "biased", "group"),
    [(torch.bfloat16, True, 1), pytest.param(torch.float32, False, 3, marks=pytest.mark.full)],
)
def test_attention(implementation: str, dtype: torch.dtype, biased: bool, group: int, n: int) -> None:
    packed, draw = packed_heads([[3, 8, 8], [8, 1, 6]], (8, 5), dtype, spare=2), torch.Generator().manual_seed(4)
    if biased:
        packed = replace(packed, bias=torch.randn(len(packed.keys), generator=draw))
    stored, written = in_8_bits(packed)
    queries = torch.randn(2, n, 3 * group, 8, generator=draw).to(dtype).transpose(1, 2)
    at = torch.stack([torch.arange(n) + 12 - n - request for request in range(2)]) if n > 1 else None
    output, lse = (kernel(queries, [stored], 0.37, at) for kernel in (ragged_attention, ragged_log_sum_exp))
    right, right_lse = expected(queries, written, 3, 0.37, at)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), right, **TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 0.02)
    last = torch.randint(-1, 12, (2, n), generator=draw).sort().values
    column = torch.ones(len(packed.keys))
    add_received(column, queries, stored, 3, last, 0.3)
    sums = expected_sums(queries, written, 3, last, 0.3, False)
    torch.testing.assert_close(column.double(), sums, rtol=0.02, atol=1e-4 if dtype == torch.bfloat16 else 1e-5)


def test_long_heads_are_attended_piece_by_piece() -> None:
    """A dense run of several heads, whose copies as floating-point numbers are more than a core's cache holds."""
    stored, written = in_8_bits(packed_heads([[3000] * 3], (64, 64), torch.float32, spare=1))
    assert len(stored.runs) == 1 and [piece.heads for piece in stored.pieces] == [1, 1, 1]
    queries = torch.randn(1, 6, 1, 64, generator=torch.Generator().manual_seed(1))
    right, _ = expected(queries, written, 3, 0.1, None)
    torch.testing.assert_close(ragged_attention(queries, [stored], 0.1).double(), right, **TOLERANCE[torch.float32])


@pytest.mark.cross
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("n", [1, 5])
def test_new_entries(implementation: str, n: int, dtype: torch.dtype) -> None:
    """Where a head ends come its new entries as `quantize` has them; nothing else changes."""
    packed, draw = packed_heads([[3, 3], [0, 9]], (8, 5), dtype, spare=6), torch.Generator().manual_seed(2)
    stored, _ = in_8_bits(packed)
    columns = (stored.keys, stored.values, stored.positions, stored.key_scale, stored.value_scale)
    before = [column.clone() for column in columns if column is not None]
    keys, values = (torch.randn(2, n, 2, size, generator=draw).to(dtype).transpose(1, 2) for size in (8, 5))
    keys[1, 1, 0, 3] = math.nan
    positions = torch.arange(n) + torch.tensor([[12], [30]])
    append_entries([stored], keys, values, positions)
    untouched = torch.ones(len(stored.keys), dtype=torch.bool)
    for run in stored.runs:
        for i in range(run.heads):
            request, head = divmod(run.first + i, 2)
            places = run.start + i * run.capacity + run.count + torch.arange(n)
            untouched[places] = False
            assert stored.positions[places].tolist() == positions[request].tolist()
            for rows, flat, scale in (
                (keys, stored.keys, stored.key_scale), (values, stored.values, stored.value_scale)
            ):  # fmt: skip
                assert scale is not None
                new, step = rows[request, head].double(), scale[places].double()
                assert torch.equal(step.isnan(), new.isnan().any(-1))
                exists = ~step.isnan()
                # Triton's interpreter cuts bfloat16 where a GPU rounds.
                cut = 2 * 127 * ROUNDING[dtype]
                torch.testing.assert_close(step[exists], new.abs().amax(-1)[exists] / 127, rtol=cut / 127, atol=0.0)
                error = (flat[places].double() * step[:, None] - new).abs() / step[:, None]
                assert (error[exists] <= 0.5 + cut).all()
    for column, old in zip([c for c in columns if c is not None], before, strict=True):
        assert torch.equal(column[untouched].nan_to_num(), old[untouched].nan_to_num())
