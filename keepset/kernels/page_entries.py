"""Entries that leave the pages of several layers at once, and come back; on a GPU in one launch for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from keepset.kernels.dispatch import launched_on, upload, uses_triton

Cache = Shaped[Tensor, "blocks kv_heads block_size width"]
"""One layer's, with any strides but for an entry's own numbers; a sub-page is `block * kv_heads + head`."""


def read_pages(
    caches: Sequence[Cache], places: range, subpages: Int[Tensor, "rows heads pages"]
) -> Shaped[Tensor, "layers_rows heads entries width"]:
    """The same whole sub-pages of several layers that are alike, layer after layer.

    Args:
        caches: of layers that share block tables.
        places: of those to read, among these.
        subpages: in the order of the entries; their numbers go on into the caches that follow, around in a circle.
    """
    first, (rows, kv_heads, pages) = caches[0], subpages.shape
    size, width = first.shape[2:]
    if uses_triton(first.device):
        from keepset.kernels.triton import page_entries  # loads Triton

        entries = first.new_empty(len(places) * rows, kv_heads, pages * size, width)
        with launched_on(first.device):
            page_entries.read(first, addresses_of(caches), places, subpages.contiguous(), entries)
        return entries
    # Not one index into a folded view: blocks and heads need not have strides that fold.
    through, head = subpages // first.shape[1], subpages % first.shape[1]
    further, block = through // len(first), through % len(first)
    read = [caches[place][block, head] for place in places]
    for steps in further[further > 0].unique().tolist():
        there = further == steps
        for place, own in zip(places, read, strict=True):
            own[there] = caches[(place + steps) % len(caches)][block[there], head[there]]
    parts = [own.flatten(2, 3) for own in read]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def take_entries(
    caches: Sequence[Cache], layers: Int[Tensor, " n"], slots: Int[Tensor, " n"]
) -> tuple[Shaped[Tensor, "n head_dim"], Shaped[Tensor, "n head_dim"]]:
    """Key and value of the entry at each `slots[i]` of layer `layers[i]`.

    Args:
        caches, layers, slots: as of `write_entries`; slots need not be distinct.
    """
    first = caches[0]
    if uses_triton(first.device):
        from keepset.kernels.triton import page_entries  # loads Triton

        entries = first.new_empty(len(slots), first.shape[3])
        if len(slots):
            with launched_on(first.device):
                page_entries.take(first, addresses_of(caches), entries, layers, slots)
    elif len(caches) == 1:
        ((_, cache, place),) = _by_layer(caches, layers, slots)
        entries = cache[place]
    else:
        entries = first.new_empty(len(slots), first.shape[3])
        for own, cache, place in _by_layer(caches, layers, slots):
            entries[own] = cache[place]
    keys, values = entries.chunk(2, -1)
    return keys, values


def write_entries(
    caches: Sequence[Cache],
    keys: Shaped[Tensor, "n head_dim"],
    values: Shaped[Tensor, "n head_dim"],
    layers: Int[Tensor, " n"],
    slots: Int[Tensor, " n"],
) -> None:
    """Puts entry `i` at `slots[i]` of layer `layers[i]`.

    Args:
        caches: of layers that are alike.
        keys, values: of each entry.
        layers: among these.
        slots: distinct within a layer: `subpage * block_size + offset`.
    """
    first = caches[0]
    if not uses_triton(first.device):
        for own, cache, place in _by_layer(caches, layers, slots):
            of_keys, of_values = cache.chunk(2, -1)
            of_keys[place], of_values[place] = keys[own], values[own]
    elif len(slots):
        from keepset.kernels.triton import page_entries  # loads Triton

        with launched_on(first.device):
            page_entries.write(first, addresses_of(caches), keys, values, layers, slots)


def _by_layer(
    caches: Sequence[Cache], layers: Int[Tensor, " n"], slots: Int[Tensor, " n"]
) -> Iterator[tuple[Tensor | slice, Cache, tuple[Tensor, Tensor, Tensor]]]:
    """Of each layer which entries are its own, its cache, and where they lie in it."""
    kv_heads, size = caches[0].shape[1:3]
    for layer, cache in enumerate(caches):
        own = (layers == layer).nonzero()[:, 0] if len(caches) > 1 else slice(None)
        place = slots[own]
        # Not one index into a folded view: blocks and heads need not have strides that fold.
        yield own, cache, (place // size // kv_heads, place // size % kv_heads, place % size)


def addresses_of(caches: Sequence[Cache]) -> Int[Tensor, " layers"]:
    """Where they begin, on their device."""
    return _table(tuple(cache.data_ptr() for cache in caches), caches[0].device)


@lru_cache(maxsize=256)
def _table(addresses: tuple[int, ...], device: torch.device) -> Int[Tensor, " layers"]:
    """Caches stay where they are: their addresses are looked up once."""
    return upload(addresses, device)
