"""Quantised rows: read and written as plain numbers say, and as vLLM's own kernels have them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from keepset.kernels import dispatch, page_format
from keepset.kernels.page_format import LEAST_SCALE
from tests.kernels.quantised import KINDS, format_of, meant, mixing_of, number_of, random_rows
from tests.kernels.test_attention import seeded

SCALED = [(kind, scale) for kind in KINDS for scale in (None, 0.3) if scale is None or kind != "int8"]
"""Kinds of numbers of 8 bits, and a layer's scale; None where each row has its own, as those of integers have."""


@pytest.mark.parametrize(("kind", "scale"), SCALED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 24])
def test_rows_are_read_as_the_numbers_that_they_stand_for(
    kind: str, scale: float | None, dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks, also of rows that are parts of wider ones; the scale of a layer's values may be another.

    Mixed ones to the last bits of sums in float32; also where the size is no power of two.
    """
    monkeypatch.setattr(page_format, "CACHE_BLOCK", 100)
    rows = random_rows(2, 3, 5, 2, kind=kind, head_dim=dim, own_scales=scale is None, draw=seeded(0)).flatten(3)
    keys, values = rows.chunk(2, -1)
    how = format_of(kind, dim, dtype, None if scale is None else (scale, 7.0))
    for part, factor in ((keys, scale), (values, None if scale is None else 7.0)):
        read = how.decode(part, None if factor is None else torch.tensor(factor))
        right = meant(part, kind, dim, factor)
        assert read.dtype == dtype and part.shape[-1] == how.row_bytes
        if kind == "int8":
            rtol = 1e-5 if dtype == torch.float32 else 2**-8
            torch.testing.assert_close(read.double(), right, rtol=rtol, atol=1e-6)
        else:
            assert torch.equal(read, right.float().to(dtype))


@pytest.mark.parametrize(("kind", "scale"), SCALED)
def test_numbers_are_stored_as_the_nearest(kind: str, scale: float | None) -> None:
    """A row's largest number is stored as the type's largest; what is beyond it is cut. Integers are mixed first."""
    numbers = torch.randn(40, 8, generator=seeded(1)) * torch.logspace(-9, 4, 40)[:, None]
    numbers[3], numbers[4, 0] = 0.0, -0.0
    how = format_of(kind, 8, torch.float32, None if scale is None else (scale, scale))
    rows = how.encode(numbers, None if scale is None else torch.tensor([scale]))
    assert rows.dtype == torch.uint8 and rows.shape == (40, how.row_bytes)
    candidates = torch.tensor([number_of(byte, kind) for byte in range(256)]).double()
    candidates = candidates[candidates.isfinite()]
    most = 127.0 if kind == "int8" else float(candidates.max())
    turned = mixing_of(8).matrix.T.double() if kind == "int8" else torch.eye(8, dtype=torch.float64)
    for number, row in zip(numbers.double() @ turned, rows, strict=True):
        step = max(float(number.abs().max()) / most, LEAST_SCALE) if scale is None else scale
        steps = (number / step).clamp(-most, most)
        nearest = (steps[:, None] - candidates).abs().amin(1)
        stored = meant(row[None], kind, 8, scale)[0] @ turned / step
        # Of two that are as near, either; and the scale itself is rounded, as mixed numbers are.
        rounding = 1e-6 if kind == "int8" else 2e-7
        torch.testing.assert_close((stored - steps).abs(), nearest, rtol=0, atol=rounding * most)


def test_halves_are_rounded_as_vllm_does() -> None:
    """Away from zero in whole numbers."""
    numbers = torch.tensor([[127.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 0.49]])
    rows = replace(format_of("int8", 8, torch.float32), mixing=None).encode(numbers)
    assert rows[:, :8].view(torch.int8).tolist() == [[127, 1, -1, 2, -2, 3, -3, 0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_spoils_its_own_row_only(kind: str, strange: float) -> None:
    how, numbers = format_of(kind, 8, torch.float32), torch.ones(3, 8)
    numbers[1, 2] = strange
    read = how.decode(how.encode(numbers))
    right = how.decode(how.encode(torch.ones(3, 8))) if kind == "int8" else torch.ones(3, 8)
    assert read[1].isnan().all() and torch.equal(read[[0, 2]], right[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whole_numbers_and_scales_are_joined_bit_for_bit(dtype: torch.dtype) -> None:
    how, scale = format_of("int8", 8, torch.float32), (torch.rand(5, generator=seeded(2)) + 1e-3).to(dtype)
    numbers = torch.randint(-127, 128, (5, 8), generator=seeded(3)).to(torch.int8)
    rows = how.join(numbers, scale)
    assert torch.equal(rows[:, :8].view(torch.int8), numbers)
    assert torch.equal(replace(how, mixing=None).decode(rows), numbers.float() * scale.float()[:, None])


def test_no_rows() -> None:
    how = format_of("int8", 4, torch.float32)
    assert how.encode(torch.zeros(0, 4)).shape == (0, 8) and how.decode(torch.zeros(2, 0, 8).byte()).shape == (2, 0, 4)
    assert dispatch.CACHE_BLOCK == page_format.CACHE_BLOCK
