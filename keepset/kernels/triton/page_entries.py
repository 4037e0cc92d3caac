"""Entries in pages inside kernels: loading and storing rows, and copies of entries of several layers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepset.kernels.page_format import PageFormat

_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
_BLOCK = 32
"""Entries that one program moves."""


def kind_of(format: PageFormat | None) -> dict[str, Any]:
    """Return the kernels' constants for a layer's format; kind 0 is unquantised.

    The compiler detects by itself that 16 divides the strides of entries, but not that only 8 does (`EIGHT`).
    """
    if format is None:
        return {"FORMAT": 0, "OWN_SCALES": False, "EIGHT": False}
    return {
        "FORMAT": _KINDS[format.numbers],
        "OWN_SCALES": format.has_row_scales,
        "EIGHT": format.row_bytes % 8 == 4,
    }


def as_bytes(cache: Tensor, format: PageFormat | None) -> Tensor:
    """Return a cache as bytes if it is quantised.

    Args:
        cache: of one layer.
        format: of the cache; None if it is not quantised.
    """
    return cache if format is None else cache.view(torch.uint8)


@triton.jit
def load_numbers(row, dims, mask, FORMAT: tl.constexpr):
    """Return numbers of rows: unquantised ones as they are, others in float32, without their scales.

    Args:
        row: pointer to each row.
        dims: which numbers; broadcast with `row`.
        mask: which of them to load; others are 0.
    """
    if FORMAT == 0:
        numbers = tl.load(row + dims, mask=mask, other=0.0)
    else:
        bits = tl.load(row + dims, mask=mask, other=0)
        if FORMAT == 1:
            numbers = bits.to(tl.int8, bitcast=True).to(tl.float32)
        elif FORMAT == 2:
            wide = bits.to(tl.uint16)
            numbers = (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
            # The exponent's bias is 8 less than that of a 16-bit float, which therefore reads a 256th from these bits.
            numbers = tl.where((wide & 127) == 127, float("nan"), numbers * 256.0)
        else:  # the upper half of a 16-bit float
            numbers = (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    return numbers


@triton.jit
def load_scales(row, mask, HEAD_DIM: tl.constexpr):
    """Return the scales of rows that have their own; 0 for rows that are not loaded.

    Args:
        row: pointer to each row.
        mask: which rows to load.
        HEAD_DIM: bytes of a row before its scale.
    """
    return tl.load((row + HEAD_DIM).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)


@triton.jit
def store_rows(
    row, rows, layer_scale, exists, dims, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr, OWN_SCALES: tl.constexpr
):
    """Write keys or values as `keepset.kernels.page_format.PageFormat.encode` does; unquantised ones unchanged.

    Args:
        row: pointer to each row.
        rows: the numbers, zero beyond `HEAD_DIM`; mixed if their format mixes them.
        layer_scale: pointer to the layer's scale, if rows have none.
        exists: which rows to write.
        dims: which numbers.
    """
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    if FORMAT == 0:
        tl.store(row[:, None] + dims[None, :], rows, mask=mask)
    else:
        rows, largest = rows.to(tl.float32), 127.0
        if FORMAT == 2:
            largest = 448.0
        if FORMAT == 3:
            largest = 57344.0
        if OWN_SCALES:
            spoilt = tl.min((rows - rows == 0.0).to(tl.int32), 1) == 0
            scale = tl.maximum(tl.max(tl.abs(rows), 1) / largest, 1e-6)
            tl.store(
                (row + HEAD_DIM).to(tl.pointer_type(tl.float32)), tl.where(spoilt, float("nan"), scale), mask=exists
            )
            steps = rows * (1.0 / scale)[:, None]
        else:
            steps = rows / tl.load(layer_scale)
        if FORMAT == 1:
            steps = tl.where(steps >= 0.0, steps + 0.5, steps - 0.5)
            bits = tl.minimum(tl.maximum(steps, -127.0), 127.0).to(tl.int8).to(tl.uint8, bitcast=True)
        elif FORMAT == 2:
            bits = _eight_bits(steps, largest, 3, 7)
        else:
            bits = _eight_bits(steps, largest, 2, 15)
        tl.store(row[:, None] + dims[None, :], bits, mask=mask)


@triton.jit
def _eight_bits(numbers, largest, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return float32 numbers as 8-bit floats, rounded to even and limited to the largest of them.

    Args:
        numbers: float32.
        largest: the largest 8-bit float.
        MANTISSA, BIAS: bits of the fraction, and the bias of the exponent.
    """
    sign = (numbers.to(tl.int32, bitcast=True) >> 24) & 128
    size = tl.minimum(tl.abs(numbers), largest)
    bits = size.to(tl.int32, bitcast=True)
    dropped: tl.constexpr = 23 - MANTISSA
    normal = (bits + (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1) >> dropped) - ((127 - BIAS) << MANTISSA)
    # Adding this number, whose last bit is the least of an 8-bit float, rounds the others.
    least: tl.constexpr = 2.0 ** (24 - MANTISSA - BIAS)
    small = (size + least).to(tl.int32, bitcast=True) - ((127 + 24 - MANTISSA - BIAS) << 23)
    code = tl.where(size < 2.0 ** (1 - BIAS), small, normal)
    return (sign | tl.where(tl.abs(numbers) >= 0.0, code, 127)).to(tl.uint8)  # NaN compares as false


def read(kind, addresses, first_layer, subpages, entries) -> None:
    """Copy sub-pages to `entries`; one program for each sub-page.

    Args:
        kind: a cache of the layers' type and strides.
        addresses: of the layers' caches.
        first_layer, subpages: as in `keepset.kernels.page_entries.read_pages`.
        entries: the result; written to.
    """
    blocks, kv_heads, size, width = kind.shape
    _read_pages[(subpages.numel(),)](
        kind, addresses.on_device, subpages, entries, *kind.stride()[:3], kv_heads, blocks, first_layer,
        len(addresses.on_device), SIZE=size, ROWS=triton.next_power_of_2(size),
        WIDTH=width, WIDE=triton.next_power_of_2(width), ALIGNED=addresses.aligned,
    )  # fmt: skip


def move(kind, addresses, keys, values, slots, into_pages: bool) -> None:  # type: ignore[no-untyped-def]
    """Copy the entry at each slot to a row of keys and one of values, or these rows into the pages.

    Args:
        kind: a cache of the layers' type and strides.
        addresses: of the layers' caches.
        keys, values: a row for each slot; written to unless `into_pages`.
        slots: as in `keepset.kernels.page_entries.write_entries`.
        into_pages: the direction.
    """
    blocks, kv_heads, size, width = kind.shape
    _move_entries[(triton.cdiv(len(slots), _BLOCK),)](
        kind, addresses.on_device, keys, values, slots, *kind.stride()[:3], keys.stride(0), values.stride(0),
        len(slots), kv_heads, size, blocks,
        HALF=width // 2, WIDE=triton.next_power_of_2(width // 2), BLOCK=_BLOCK, INTO_PAGES=into_pages,
        ALIGNED=addresses.aligned,
    )  # fmt: skip


# Only the dtype of `kind` is used: caches are found by their addresses.
@triton.jit(do_not_specialize=["first"])
def _read_pages(
    kind, addresses, subpages, entries, of_block, of_head, of_token, kv_heads, blocks, first, layers,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copy one sub-page; one program for each."""
    page = tl.program_id(0).to(tl.int64)
    subpage = tl.load(subpages + page).to(tl.int64)
    through = subpage // kv_heads
    cache = tl.load(addresses + (first + through // blocks) % layers).to(kind.dtype)
    if ALIGNED:
        cache = tl.multiple_of(cache, 16)
    token, dims = tl.arange(0, ROWS).to(tl.int64), tl.arange(0, WIDE)
    mask = (token < SIZE)[:, None] & (dims < WIDTH)[None, :]
    source = cache + through % blocks * of_block + subpage % kv_heads * of_head
    numbers = tl.load(source + (token * of_token)[:, None] + dims[None, :], mask=mask)
    target = entries + page * SIZE * WIDTH
    tl.store(target + (token * WIDTH)[:, None] + dims[None, :], numbers, mask=mask)


@triton.jit(do_not_specialize=["number"])
def _move_entries(
    kind, addresses, keys, values, slots, of_block, of_head, of_token, of_key, of_value, number, kv_heads, size, blocks,
    HALF: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, INTO_PAGES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copy one block of entries into the pages or out of them; one program for each block."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = entry < number
    slot = tl.load(slots + entry, mask=exists, other=0).to(tl.int64)
    subpage = slot // size
    block = subpage // kv_heads
    cache = tl.load(addresses + block // blocks).to(kind.dtype)
    if ALIGNED:
        cache = tl.multiple_of(cache, 16)
    dims = tl.arange(0, WIDE)
    mask = exists[:, None] & (dims < HALF)[None, :]
    offset = block % blocks * of_block + subpage % kv_heads * of_head + slot % size * of_token
    inside = (cache + offset)[:, None] + dims[None, :]
    key, value = keys + (entry * of_key)[:, None] + dims[None, :], values + (entry * of_value)[:, None] + dims[None, :]
    if INTO_PAGES:
        tl.store(inside, tl.load(key, mask=mask), mask=mask)
        tl.store(inside + HALF, tl.load(value, mask=mask), mask=mask)
    else:
        tl.store(key, tl.load(inside, mask=mask), mask=mask)
        tl.store(value, tl.load(inside + HALF, mask=mask), mask=mask)
