"""Entries that leave the pages of several layers at once, and come back; on a GPU in one launch for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from keepset.kernels.dispatch import launched_on, upload, uses_triton

Cache = Shaped[Tensor, "blocks kv_heads block_size width"]
"""One layer's, with any strides but for an entry's own numbers; a sub-page is `block * kv_heads + head`."""


def read_pages(
    caches: Sequence[Cache], place: int, subpages: Int[Tensor, "*rows pages"]
) -> Shaped[Tensor, "*rows entries width"]:
    """Whole sub-pages, each row's joined.

    Args:
        caches: of layers that are alike and share block tables.
        place: of the layer among these whose first sub-page is number 0.
        subpages: in the order of the entries; their numbers go on into the caches that follow, around in a circle.
    """
    first, (*rows, pages) = caches[0], subpages.shape
    size, width = first.shape[2:]
    if uses_triton(first.device):
        from keepset.kernels.triton import page_entries  # loads Triton

        entries = first.new_empty(*rows, pages * size, width)
        with launched_on(first.device):
            page_entries.read(first, addresses_of(caches), place, subpages.contiguous(), entries)
        return entries
    number, subpages = first.shape[:2].numel(), subpages.flatten().long()
    layers = (place + subpages // number).unique().tolist()
    if len(layers) == 1:  # as nearly always
        read = _pages(caches[layers[0] % len(caches)], subpages % number)
    else:
        through = place + subpages // number
        read = first.new_empty(len(subpages), size, width)
        for layer in layers:
            there = (through == layer).nonzero()[:, 0]
            read[there] = _pages(caches[layer % len(caches)], subpages[there] % number)
    return read.reshape(*rows, pages * size, width)


def _pages(cache: Cache, subpages: Int[Tensor, " n"]) -> Shaped[Tensor, "n block_size width"]:
    """Whole sub-pages of a layer."""
    if cache.stride(0) == cache.shape[1] * cache.stride(1):
        return cache.flatten(0, 1).index_select(0, subpages)  # twice as fast as by two indices
    return cache[subpages // cache.shape[1], subpages % cache.shape[1]]


def take_entries(
    caches: Sequence[Cache], slots: Int[Tensor, " n"]
) -> tuple[Shaped[Tensor, "n head_dim"], Shaped[Tensor, "n head_dim"]]:
    """Key and value of the entry at each of these slots.

    Args:
        caches, slots: as of `write_entries`; slots need not be distinct.
    """
    first = caches[0]
    if uses_triton(first.device):
        from keepset.kernels.triton import page_entries  # loads Triton

        entries = first.new_empty(len(slots), first.shape[3])
        if len(slots):
            with launched_on(first.device):
                page_entries.take(first, addresses_of(caches), entries, slots)
    elif len(parts := _by_layer(caches, slots)) == 1:
        ((_, cache, place),) = parts
        entries = cache[place]
    else:
        entries = first.new_empty(len(slots), first.shape[3])
        for own, cache, place in parts:
            entries[own] = cache[place]
    keys, values = entries.chunk(2, -1)
    return keys, values


def write_entries(
    caches: Sequence[Cache],
    keys: Shaped[Tensor, "n head_dim"],
    values: Shaped[Tensor, "n head_dim"],
    slots: Int[Tensor, " n"],
) -> None:
    """Puts entry `i` at `slots[i]`.

    Args:
        caches: of layers that are alike.
        keys, values: of each entry.
        slots: distinct: `subpage * block_size + offset`, where sub-pages are numbered through all caches.
    """
    first = caches[0]
    if not uses_triton(first.device):
        for own, cache, place in _by_layer(caches, slots):
            of_keys, of_values = cache.chunk(2, -1)
            of_keys[place], of_values[place] = keys[own], values[own]
    elif len(slots):
        from keepset.kernels.triton import page_entries  # loads Triton

        with launched_on(first.device):
            page_entries.write(first, addresses_of(caches), keys, values, slots)


def _by_layer(
    caches: Sequence[Cache], slots: Int[Tensor, " n"]
) -> list[tuple[Tensor | slice, Cache, tuple[Tensor, Tensor, Tensor]]]:
    """Of each layer that has any, which entries are its own, its cache, and where they lie in it."""
    blocks, kv_heads, size = caches[0].shape[:3]
    through, parts = slots // (blocks * kv_heads * size), []
    layers = through.unique().tolist()
    for layer in layers:
        own = (through == layer).nonzero()[:, 0] if len(layers) > 1 else slice(None)
        place = slots[own] // size
        # Not one index into a folded view: blocks and heads need not have strides that fold.
        parts.append((own, caches[layer], (place // kv_heads % blocks, place % kv_heads, slots[own] % size)))
    return parts


def addresses_of(caches: Sequence[Cache]) -> Int[Tensor, " layers"]:
    """Where they begin, on their device."""
    return _table(tuple(cache.data_ptr() for cache in caches), caches[0].device)


@lru_cache(maxsize=256)
def _table(addresses: tuple[int, ...], device: torch.device) -> Int[Tensor, " layers"]:
    """Caches stay where they are: their addresses are looked up once."""
    return upload(addresses, device)
