"""Keys and values in 8 and 4 bits, and the matrix by which their rows are mixed, against plain numbers."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch

from keepset.kernels.entry_format import FORMATS, LEVELS, format_of, mixing, mixing_of
from tests.kernels.few_bits import matrix, meant, rounded
from tests.kernels.test_attention import ROUNDING, seeded

EIGHT, FOUR = FORMATS[8], FORMATS[4]


def draws(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_number_of_8_bits_is_within_half_a_step(dtype: torch.dtype) -> None:
    rows = draws(3, 40, 33).to(dtype)
    rows[0, :10] *= torch.logspace(-1, 3, 10)[:, None].to(dtype)
    whole, scale = EIGHT.quantize(rows, dtype)
    assert whole.dtype == torch.int8 and scale.dtype == dtype and scale.shape == rows.shape[:2]
    for row, integers, step in zip(rows.flatten(0, 1), whole.flatten(0, 1), scale.flatten().tolist(), strict=True):
        assert step == pytest.approx(max(map(abs, row.tolist())) / 127, rel=ROUNDING[dtype])
        for number, integer in zip(row.tolist(), integers.tolist(), strict=True):
            assert abs(integer) <= 127 and abs(integer * step - number) <= step * (0.5 + 127 * ROUNDING[dtype])
    again, _ = EIGHT.quantize(EIGHT.dequantize(whole, scale), dtype)
    assert (again == whole).float().mean() > 0.999


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [2, 6, 8, 24, 64])
def test_4_bits_are_the_nearest_levels_with_the_scale_of_least_squares(size: int, dtype: torch.dtype) -> None:
    rows = draws(5, 8, size).to(dtype)
    stored, scale = FOUR.quantize(rows, dtype)
    assert stored.dtype == torch.uint8 and stored.shape == (5, 8, size // 2) and scale.dtype == dtype
    assert format_of(stored.dtype) is FOUR and FOUR.size(stored.shape[-1]) == size
    right = torch.stack([rounded(row, dtype) for row in rows.flatten(0, 1)]).view(rows.shape)
    torch.testing.assert_close(meant(stored, scale), right, rtol=1e-5, atol=1e-6)
    read = FOUR.dequantize(stored, scale)
    assert read.dtype == dtype
    torch.testing.assert_close(read.double(), right, rtol=2 * ROUNDING[dtype] + 1e-6, atol=1e-6)
    again, same = FOUR.quantize(read, dtype)
    assert torch.equal(again, stored)
    torch.testing.assert_close(same, scale, rtol=8 * ROUNDING[dtype], atol=0.0)


@pytest.mark.parametrize("bits", FORMATS)
def test_rows_of_nothing_and_of_no_number(bits: int) -> None:
    format = FORMATS[bits]
    rows = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [-3.0, 1.5], [1e-42, 0.0]])
    again = format.dequantize(*format.quantize(rows, rows.dtype))
    assert not again[0].any() and again[1:3].isnan().all() and again[4].abs().max() < 1e-38
    near = [-3.0, 3.0 * 64 / 127] if bits == 8 else rounded(rows[3]).tolist()
    assert again[3].tolist() == pytest.approx(near)
    nothing, scale = format.quantize(rows[:0], rows.dtype)
    assert format.dequantize(nothing, scale).shape == (0, 2)


def test_each_level_is_the_mean_of_a_normal_distribution_between_its_borders() -> None:
    normal = NormalDist()
    borders = [0.0, *((a + b) / 2 for a, b in pairwise(LEVELS)), 40.0]
    for level, (low, high) in zip(LEVELS, pairwise(borders), strict=True):
        mean = (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low))
        assert level == pytest.approx(mean, abs=3e-4)


def test_a_second_layer_has_nearly_8_bits() -> None:
    rows = FOUR.mix(draws(200, 64) * draws(64, seed=2).exp())
    first = FOUR.dequantize(*FOUR.quantize(rows, rows.dtype))
    refined = first + FOUR.dequantize(*FOUR.quantize(rows - first, rows.dtype))
    errors = [((part - rows).square().sum() / rows.square().sum()).sqrt() for part in (first, refined)]
    assert 0.08 < errors[0] < 0.1 and errors[1] < 0.011


# --- mixed


@pytest.mark.parametrize("size", [1, 2, 6, 10, 64, 72, 80, 96, 128])
def test_the_matrix_is_orthogonal_and_never_changes(size: int) -> None:
    torch.testing.assert_close(mixing(size), matrix(size))
    torch.testing.assert_close(mixing(size) @ mixing(size).T, torch.eye(size, dtype=torch.float64))
    # A single number is spread over the whole row.
    if size > 2:
        assert mixing(size).abs().max() <= math.sqrt(2 / (size & -size))


@pytest.mark.few
@pytest.mark.cross
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [6, 80, 160])
def test_rows_anywhere(implementation: str, size: int, dtype: torch.dtype) -> None:
    """As models make them token by token, in one row, of any number of axes, none, and with numbers apart."""
    draw, spread = seeded(1), mixing_of(size, "cpu")
    by_token, turned = torch.randn(2, 9, 3, size, generator=draw).to(dtype), matrix(size)
    every = [by_token, by_token.transpose(1, 2), by_token[0, 0, 1], by_token[:, :0], by_token[None, :, None]]
    every.append(torch.randn(size, 40, generator=draw).to(dtype).T)
    # Products are float32 and come back in the rows' type; Triton's interpreter cuts bfloat16 where a GPU rounds.
    atol = 1e-5 + 8 * ROUNDING[dtype]
    for rows in every:
        output = torch.full_like(rows, 7.0, memory_format=torch.contiguous_format)
        assert spread.unmixed(rows, output) is output
        mixed = spread.mixed(rows), spread.mixed_queries(rows), spread.unmixed(rows), output
        for result, by in zip(mixed, (turned.T, turned.T, turned, turned), strict=True):
            assert result.dtype == dtype and result.shape == rows.shape
            torch.testing.assert_close(result.double(), rows.double() @ by, rtol=0, atol=atol)


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_no_number_spoils_its_own_mixed_row_only(implementation: str, strange: float) -> None:
    rows = torch.ones(40, 16)
    rows[3, 5] = strange
    mixed = mixing_of(16, "cpu").mixed(rows)
    assert not mixed[3].isfinite().any()
    assert mixed[[0, 2, 4, 39]].isfinite().all()
