"""Rows are mixed by a matrix from formulas, whatever type they have and wherever they lie, and mixed back."""

from __future__ import annotations

import math

import pytest
import torch

from keepset.kernels.entry_format import mixing, mixing_of
from tests.kernels.few_bits import matrix
from tests.kernels.test_attention import ROUNDING, seeded

CPU = torch.device("cpu")


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
    draw, spread = seeded(1), mixing_of(size, CPU)
    by_token = torch.randn(2, 9, 3, size, generator=draw).to(dtype)
    every = [by_token, by_token.transpose(1, 2), by_token[0, 0, 1], by_token[:, :0], by_token[None, :, None]]
    every.append(torch.randn(size, 40, generator=draw).to(dtype).T)
    # Products are float32 and come back in the rows' type; Triton's interpreter cuts bfloat16 where a GPU rounds.
    atol = 1e-5 + 8 * ROUNDING[dtype]
    for rows in every:
        whole, turned = rows.double(), matrix(size)
        for made, right in (
            (spread.mixed(rows), whole @ turned.T),
            (spread.mixed_queries(rows), whole @ turned.T),
            (spread.unmixed(rows), whole @ turned),
        ):
            assert made.dtype == dtype and made.shape == rows.shape
            torch.testing.assert_close(made.double(), right, rtol=0, atol=atol)
        output = torch.full_like(rows, 7.0, memory_format=torch.contiguous_format)
        assert spread.unmixed(rows, output) is output
        torch.testing.assert_close(output.double(), whole @ turned, rtol=0, atol=atol)


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_no_number_spoils_its_own_row_only(implementation: str, strange: float) -> None:
    rows = torch.ones(40, 16)
    rows[3, 5] = strange
    mixed = mixing_of(16, CPU).mixed(rows)
    assert not mixed[3].isfinite().any()
    assert mixed[[0, 2, 4, 39]].isfinite().all()
