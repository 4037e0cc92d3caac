"""Entries that leave the pages of several layers at once, and come back; on a GPU in one launch for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.kernels.dispatch import launched_on, upload, uses_triton

Cache = Float[Tensor, "blocks kv_heads block_size width"]
"""One layer's, with any strides but for an entry's own numbers; a sub-page is `block * kv_heads + head`."""


def read_pages(
    caches: Sequence[Cache], subpages: Int[Tensor, "rows kv_heads pages"]
) -> Float[Tensor, "layers_rows kv_heads entries width"]:
    """The same whole sub-pages of several layers that are alike, layer after layer.

    Args:
        caches: the layers'.
        subpages: in the order of the entries.
    """
    first, (rows, kv_heads, pages) = caches[0], subpages.shape
    size, width = first.shape[2:]
    if uses_triton(first.device):
        from keepset.kernels.triton import page_entries  # loads Triton

        entries = first.new_empty(len(caches) * rows, kv_heads, pages * size, width)
        with launched_on(first.device):
            page_entries.read(first, addresses_of(caches), subpages.contiguous(), entries)
        return entries
    # Not one index into a folded view: blocks and heads need not have strides that fold.
    place = subpages // first.shape[1], subpages % first.shape[1]
    return torch.cat([cache[place].flatten(2, 3) for cache in caches])


def write_entries(
    caches: Sequence[Cache],
    entries: Float[Tensor, "n width"],
    layers: Int[Tensor, " n"],
    slots: Int[Tensor, " n"],
) -> None:
    """Puts entry `i` at `slots[i]` of layer `layers[i]`.

    Args:
        caches: of layers that are alike.
        entries: key and value of each.
        layers: among these.
        slots: distinct within a layer: `subpage * block_size + offset`.
    """
    first = caches[0]
    if uses_triton(first.device):
        from keepset.kernels.triton import page_entries  # loads Triton

        if len(entries):
            with launched_on(first.device):
                page_entries.write(first, addresses_of(caches), entries.contiguous(), layers, slots)
        return
    kv_heads, size = first.shape[1:3]
    for layer, cache in enumerate(caches):
        own = (layers == layer).nonzero()[:, 0] if len(caches) > 1 else slice(None)
        place = slots[own]
        cache[place // size // kv_heads, place // size % kv_heads, place % size] = entries[own]


def addresses_of(caches: Sequence[Cache]) -> Int[Tensor, " layers"]:
    """Where the layers' caches begin, on their device."""
    return _table(tuple(cache.data_ptr() for cache in caches), caches[0].device)


@lru_cache(maxsize=256)
def _table(addresses: tuple[int, ...], device: torch.device) -> Int[Tensor, " layers"]:
    """Caches stay where they are: their addresses are looked up once."""
    return upload(addresses, device)
