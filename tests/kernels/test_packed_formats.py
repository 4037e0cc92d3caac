"""TurboQuant's and NVFP4's keys and values, against readers that take one bit at a time."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keepset.kernels.packed_formats import NVFP4Format, TurboQuantFormat, packed, unpacked
from tests.kernels.packed import KINDS, drawn_rows, format_of, meant, small_float

ROWS, HEAD_DIM = 5, 64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def whole_numbers(row: list[int], bits: int, numbers: int) -> list[int]:
    """Bits from each byte's lowest on, a number's lowest first."""
    stream = [byte >> i & 1 for byte in row for i in range(8)]
    return [sum(stream[i * bits + j] << j for j in range(bits)) for i in range(numbers)]


def half(row: list[int]) -> float:
    return struct.unpack("<e", bytes(row))[0]


def turboquant(key_bits: int, value_bits: int, **more: Any) -> TurboQuantFormat:
    draw = torch.Generator().manual_seed(3)
    centroids, rotation = torch.randn(2**key_bits, generator=draw), torch.randn(HEAD_DIM, HEAD_DIM, generator=draw)
    options = {"unit_length": True, "has_fp16_exponents": False} | more
    return TurboQuantFormat(HEAD_DIM, torch.float32, key_bits, value_bits, centroids, rotation, **options)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("nvfp4 by tokens", "nvfp4 swizzled")])
def test_bytes_are_read_as_what_they_mean(kind: str) -> None:
    """Centroids of any length or of 1 times a length, steps from the least number, floats with a scale for sixteen."""
    how, draw = format_of(kind, HEAD_DIM, torch.float32), torch.Generator().manual_seed(1)
    rows = drawn_rows(kind, how, ROWS, draw)
    keys, values = rows.split([how.key_bytes, how.value_bytes], -1)
    filled = torch.cat([values, drawn(ROWS, 2)], -1) if kind != "nvfp4" else values  # bytes that only fill the slot
    right_keys, right_values = meant(rows, how)
    close = 1e-4 if kind in ("k3v3", "k3v4", "k4v4") else 1e-6  # sums of 64 products in float32
    torch.testing.assert_close(how.decode_keys(keys).double(), right_keys, rtol=close, atol=close)
    torch.testing.assert_close(how.decode_values(filled).double(), right_values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("has_fp16_exponents", "bias"), [(False, 7), (True, 15)])
def test_turboquants_keys_of_eight_bits_are_floats(has_fp16_exponents: bool, bias: int) -> None:
    how = turboquant(8, 4, has_fp16_exponents=has_fp16_exponents)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F < 0x7F].repeat(2)[: 4 * HEAD_DIM].view(4, HEAD_DIM)  # the last is NaN with a bias of 7
    right = [[small_float(code, 3, 4, bias) for code in row] for row in codes.tolist()]
    assert torch.equal(how.decode_keys(codes), torch.tensor(right))
    assert how.key_bytes == HEAD_DIM


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turboquants_keys_are_stored_as_the_nearest_centroids(bits: int, dtype: torch.dtype) -> None:
    """Number by number of the rotated direction; a row that is no number spoils no other."""
    draw = torch.Generator().manual_seed(4)
    rotation = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, generator=draw)).Q
    how = replace(turboquant(bits, 4), rotation=rotation, centroids=torch.linspace(-0.4, 0.4, 2**bits) ** 3 * 4)
    keys = (torch.randn(9, HEAD_DIM, generator=draw) * torch.logspace(-3, 3, 9)[:, None]).to(dtype)
    keys[2], keys[5, 3] = 0.0, math.nan
    rows = how.encode_keys(keys)
    assert rows.shape == (9, how.key_bytes) and rows.dtype == torch.uint8
    for index, (row, key) in enumerate(zip(rows.tolist(), keys.double(), strict=True)):
        if index == 5:
            assert math.isnan(half(row[-2:]))
            continue
        assert half(row[-2:]) == float(key.norm().half())
        turned = rotation.double() @ key / (key.norm() + 1e-8)
        for number, code in zip(turned.tolist(), whole_numbers(row[:-2], bits, HEAD_DIM), strict=True):
            off = [abs(number - level) for level in how.centroids.tolist()]
            assert off[code] <= min(off) + 1e-6  # of two that are as near, either


@pytest.mark.parametrize("bits", [3, 4])
def test_turboquants_values_are_stored_as_the_nearest_steps(bits: int) -> None:
    how, draw = turboquant(8, bits), torch.Generator().manual_seed(5)
    values = torch.randn(9, HEAD_DIM, generator=draw) * torch.logspace(-3, 3, 9)[:, None]
    values[2], values[3], values[5, 3] = 0.0, -4.0, math.nan
    read = how.decode_values(how.encode_values(values))
    step = (values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)) / (2**bits - 1)
    assert read[5].isnan().all()
    good = [row for row in range(9) if row != 5]
    # Half a step, and what 16-bit floats round of a step and of the least number.
    allowed = step / 2 + values.abs().amax(-1, keepdim=True) * 2**-10
    assert ((read - values).abs() <= allowed)[good].all()


@pytest.mark.parametrize(("has_fp16_exponents", "bias", "most"), [(False, 7, 448.0), (True, 15, 1.875)])
def test_turboquants_keys_are_stored_as_the_nearest_floats(has_fp16_exponents: bool, bias: int, most: float) -> None:
    how = turboquant(8, 4, has_fp16_exponents=has_fp16_exponents)
    keys = torch.randn(40, HEAD_DIM, generator=torch.Generator().manual_seed(6)) * torch.logspace(-4, 3, 40)[:, None]
    read, codes = how.decode_keys(how.encode_keys(keys)), range(127 if bias == 7 else 128)
    sizes = torch.tensor([small_float(code, 3, 4, bias) for code in codes])
    nearest = (keys.abs().clamp(max=most)[..., None] - sizes).abs().amin(-1)
    # A number that is rounded to 16 bits before it is rounded to 8 may be in the middle of two.
    assert ((read - keys.clamp(-most, most)).abs() <= nearest + keys.abs() * 2**-10 + 2**-24).all()
    assert torch.equal(read.sign().abs() * keys.sign(), read.sign())


def test_nvfp4s_numbers_are_stored_as_the_nearest() -> None:
    """Of two that are as near, the one that is even; the largest of sixteen is stored as 6 to the scale's rounding."""
    how, draw = NVFP4Format(32, torch.float32, torch.tensor(0.5), torch.tensor(4.0)), torch.Generator().manual_seed(7)
    numbers = torch.randn(30, 32, generator=draw) * torch.logspace(-1.5, 2, 30)[:, None]
    numbers[1], numbers[2, 20], numbers[3, 1] = 0.0, math.inf, math.nan
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    numbers[4, :16] = torch.tensor([*halves, *(-half for half in halves)]) * 2
    for values, factor in ((False, 0.5), (True, 4.0)):
        rows = how.encode_values(numbers) if values else how.encode_keys(numbers)
        levels = [small_float(code, 1, 2, 1) for code in range(16)]
        for index, (row, whole) in enumerate(zip(rows.tolist(), numbers.tolist(), strict=True)):
            for group in range(2):
                some, stored = whole[group * 16 : group * 16 + 16], row[16 + group]
                if not all(map(math.isfinite, some)):
                    assert stored & 0x7F == 0x7F
                    continue
                scale = small_float(stored, 3, 4, 7)
                wanted = min(max(map(abs, some)) / 6 / factor, 448.0)
                assert abs(scale - wanted) <= max(wanted / 16, 2.0**-10)
                for number, code in zip(some, whole_numbers(row, 4, 32)[group * 16 :], strict=False):
                    off = [abs(number / factor - level * scale) for level in levels]
                    assert off[code] <= min(off) * (1 + 1e-6) + 1e-9
            if index == 4 and not values:
                evens = [0, 2, 2, 4, 4, 6, 6, 7]
                assert whole_numbers(row, 4, 16) == [*evens, *(8 + code for code in evens)]


def test_what_is_packed_is_unpacked() -> None:
    for bits in (3, 4):
        numbers = torch.randint(2**bits, (5, 3, 40), generator=torch.Generator().manual_seed(bits))
        rows = packed(numbers, bits)
        assert rows.shape == (5, 3, 5 * bits) and torch.equal(unpacked(rows, bits, 40), numbers.int())
        assert whole_numbers(rows[1, 2].tolist(), bits, 40) == numbers[1, 2].tolist()


def test_rows_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    how, rows = turboquant(3, 3), drawn(3, 7, HEAD_DIM * 3 // 8 + 2)
    rows[..., -1] &= 0x3F  # no NaN
    whole = how.decode_keys(rows)
    monkeypatch.setattr("keepset.kernels.page_format.CACHE_BLOCK", 4 * HEAD_DIM)
    torch.testing.assert_close(how.decode_keys(rows), whole)  # products of other sizes are summed in another order
    assert whole.shape == (3, 7, HEAD_DIM)
