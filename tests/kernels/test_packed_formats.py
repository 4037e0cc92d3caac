"""TurboQuant's and NVFP4's keys and values, against readers that take one bit at a time."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from keepset.kernels.packed_formats import NVFP4Format, TurboQuantFormat

ROWS, HEAD_DIM = 5, 64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def whole_numbers(row: list[int], bits: int, numbers: int) -> list[int]:
    """Bits from each byte's lowest on, a number's lowest first."""
    stream = [byte >> i & 1 for byte in row for i in range(8)]
    return [sum(stream[i * bits + j] << j for j in range(bits)) for i in range(numbers)]


def small_float(code: int, mantissa: int, exponent: int, bias: int) -> float:
    """A float with so many bits of mantissa and exponent, which has no infinity."""
    sign, power, part = code >> mantissa + exponent, code >> mantissa & (1 << exponent) - 1, code & (1 << mantissa) - 1
    size = 2.0**-mantissa * (part + (2**mantissa if power else 0)) * 2.0 ** (max(power, 1) - bias)
    return -size if sign else size


def half(row: list[int]) -> float:
    return struct.unpack("<e", bytes(row))[0]


def turboquant(key_bits: int, value_bits: int, **more: Any) -> TurboQuantFormat:
    draw = torch.Generator().manual_seed(3)
    centroids, rotation = torch.randn(2**key_bits, generator=draw), torch.randn(HEAD_DIM, HEAD_DIM, generator=draw)
    options = {"unit_length": True, "has_fp16_exponents": False} | more
    return TurboQuantFormat(HEAD_DIM, torch.float32, key_bits, value_bits, centroids, rotation, **options)


def with_halves(rows: Tensor, *halves: Tensor) -> Tensor:
    """Rows that end in 16-bit floats."""
    ends = torch.stack(halves, -1).half().view(torch.uint8)
    return torch.cat([rows, ends], -1)


@pytest.mark.parametrize("unit_length", [True, False])
@pytest.mark.parametrize("bits", [3, 4])
def test_turboquants_keys_are_centroids_times_a_length(bits: int, unit_length: bool) -> None:
    how = turboquant(bits, 4, unit_length=unit_length)
    rows = with_halves(drawn(ROWS, HEAD_DIM * bits // 8), torch.randn(ROWS, generator=torch.Generator().manual_seed(1)))
    assert rows.shape[1] == how.key_bytes
    for row, key in zip(rows.tolist(), how.decode_keys(rows), strict=True):
        chosen = [float(how.centroids[i]) for i in whole_numbers(row[:-2], bits, HEAD_DIM)]
        length = math.sqrt(sum(number**2 for number in chosen)) if unit_length else 1.0
        right = [
            half(row[-2:]) * sum(number * float(by) for number, by in zip(chosen, column, strict=True)) / length
            for column in how.rotation.T
        ]
        torch.testing.assert_close(key, torch.tensor(right), rtol=1e-4, atol=1e-4)  # sums of 64 products in float32


@pytest.mark.parametrize(("has_fp16_exponents", "bias"), [(False, 7), (True, 15)])
def test_turboquants_keys_of_eight_bits_are_floats(has_fp16_exponents: bool, bias: int) -> None:
    how = turboquant(8, 4, has_fp16_exponents=has_fp16_exponents)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F < 0x7F].repeat(2)[: 4 * HEAD_DIM].view(4, HEAD_DIM)  # the last is NaN with a bias of 7
    right = [[small_float(code, 3, 4, bias) for code in row] for row in codes.tolist()]
    assert torch.equal(how.decode_keys(codes), torch.tensor(right))
    assert how.key_bytes == HEAD_DIM


@pytest.mark.parametrize("bits", [3, 4])
def test_turboquants_values_are_steps_from_the_least_number(bits: int) -> None:
    how, draw = turboquant(4, bits), torch.Generator().manual_seed(2)
    steps, least = torch.rand(ROWS, generator=draw), torch.randn(ROWS, generator=draw)
    rows = with_halves(drawn(ROWS, HEAD_DIM * bits // 8), steps, least)
    assert rows.shape[1] == how.value_bytes
    filled = torch.cat([rows, drawn(ROWS, 2)], -1)  # with bytes that only fill the slot
    for row, value in zip(rows.tolist(), how.decode_values(filled), strict=True):
        right = [i * half(row[-4:-2]) + half(row[-2:]) for i in whole_numbers(row[:-4], bits, HEAD_DIM)]
        torch.testing.assert_close(value, torch.tensor(right), rtol=1e-6, atol=1e-6)  # rounded twice


def test_nvfp4_is_floats_with_a_scale_for_sixteen() -> None:
    how = NVFP4Format(HEAD_DIM, torch.float32, torch.tensor(0.5), torch.tensor(4.0))
    rows = drawn(2, ROWS, HEAD_DIM // 2 + HEAD_DIM // 16)
    rows[..., HEAD_DIM // 2 :].clamp_(max=0x7E)  # scales are positive, and not NaN
    for read, factor in ((how.decode_keys, 0.5), (how.decode_values, 4.0)):
        for row, found in zip(rows.flatten(0, 1).tolist(), read(rows).flatten(0, 1), strict=True):
            numbers = whole_numbers(row[: HEAD_DIM // 2], 4, HEAD_DIM)
            scales = [small_float(code, 3, 4, 7) for code in row[HEAD_DIM // 2 :]]
            right = [small_float(code, 1, 2, 1) * scales[i // 16] * factor for i, code in enumerate(numbers)]
            assert torch.equal(found, torch.tensor(right))
    assert how.key_bytes == how.value_bytes == rows.shape[-1]


def test_rows_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    how, rows = turboquant(3, 3), drawn(3, 7, HEAD_DIM * 3 // 8 + 2)
    rows[..., -1] &= 0x3F  # no NaN
    whole = how.decode_keys(rows)
    monkeypatch.setattr("keepset.kernels.page_format.CACHE_BLOCK", 4 * HEAD_DIM)
    torch.testing.assert_close(how.decode_keys(rows), whole)  # products of other sizes are summed in another order
    assert whole.shape == (3, 7, HEAD_DIM)
