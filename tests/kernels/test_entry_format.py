"""Keys and values in 8 and 4 bits, against plain numbers."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch

from keepset.kernels.entry_format import FORMATS, LEVELS, format_of
from tests.kernels.few_bits import meant, rounded
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
    both = first + FOUR.dequantize(*FOUR.quantize(rows - first, rows.dtype))
    errors = [((each - rows).square().sum() / rows.square().sum()).sqrt() for each in (first, both)]
    assert 0.08 < errors[0] < 0.1 and errors[1] < 0.011
