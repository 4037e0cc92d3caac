"""Copies of entries out of the pages of several layers and into them; layers are found by their addresses."""

from __future__ import annotations

import triton
import triton.language as tl

_BLOCK = 32


def read(kind, addresses, place, subpages, entries) -> None:
    """Copy sub-pages to `entries`; one program for each sub-page."""
    blocks, kv_heads, size, width = kind.shape
    _read_pages[(subpages.numel(),)](
        kind, addresses.on_device, subpages, entries, *kind.stride()[:3], kv_heads, blocks, place,
        len(addresses.on_device), SIZE=size, ROWS=triton.next_power_of_2(size),
        WIDTH=width, WIDE=triton.next_power_of_2(width), ALIGNED=addresses.aligned,
    )  # fmt: skip


def move(kind, addresses, keys, values, slots, into_pages: bool) -> None:  # type: ignore[no-untyped-def]
    """Copy the entry at each slot to a row of keys and one of values, or these rows into the pages."""
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
    place = block % blocks * of_block + subpage % kv_heads * of_head + slot % size * of_token
    inside = (cache + place)[:, None] + dims[None, :]
    key, value = keys + (entry * of_key)[:, None] + dims[None, :], values + (entry * of_value)[:, None] + dims[None, :]
    if INTO_PAGES:
        tl.store(inside, tl.load(key, mask=mask), mask=mask)
        tl.store(inside + HALF, tl.load(value, mask=mask), mask=mask)
    else:
        tl.store(key, tl.load(inside, mask=mask), mask=mask)
        tl.store(value, tl.load(inside + HALF, mask=mask), mask=mask)
