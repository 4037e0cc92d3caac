"""Reading entries from the pages of several layers, and writing them back; on a GPU in one launch for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from keepset.kernels.dispatch import launched_on, upload, uses_triton
from keepset.kernels.page_layout import Addresses, LayerPages


def read_keys(
    caches: Sequence[LayerPages], first_layer: int, subpages: Int[Tensor, "*rows pages"]
) -> Shaped[Tensor, "*rows entries row"]:
    """Return the stored keys of whole sub-pages; see `read_pages`.

    Args:
        caches, first_layer, subpages: as in `read_pages`.
    """
    return read_pages([cache[..., : cache.shape[3] // 2] for cache in caches], first_layer, subpages)


def read_pages(
    caches: Sequence[LayerPages], first_layer: int, subpages: Int[Tensor, "*rows pages"]
) -> Shaped[Tensor, "*rows entries width"]:
    """Return the entries of whole sub-pages, each row's pages joined.

    Args:
        caches: caches of layers of one shape that share block tables.
        first_layer: index of the layer whose first sub-page is number 0.
        subpages: numbers of the sub-pages, in the order of the entries. The numbering continues into the following
            caches, and from the last cache into the first.
    """
    first, (*rows, pages) = caches[0], subpages.shape
    size, width = first.shape[2:]
    if uses_triton(first.device):
        from keepset.kernels.triton import page_entries  # loads Triton

        entries = first.new_empty(*rows, pages * size, width)
        with launched_on(first.device):
            page_entries.read(first, addresses_of(caches), first_layer, subpages.contiguous(), entries)
        return entries
    number, subpages = first.shape[:2].numel(), subpages.flatten().long()
    parts = [
        (item_indices, _pages(caches[layer % len(caches)], subpages[item_indices] % number))
        for layer, item_indices in by_layer(first_layer + subpages // number)
    ]
    return joined(parts, len(subpages)).reshape(*rows, pages * size, width)


def _pages(cache: LayerPages, subpages: Int[Tensor, " n"]) -> Shaped[Tensor, "n block_size width"]:
    if cache.stride(0) == cache.shape[1] * cache.stride(1):
        return cache.flatten(0, 1).index_select(0, subpages)  # twice as fast as by two indices
    return cache[subpages // cache.shape[1], subpages % cache.shape[1]]


def take_entries(
    caches: Sequence[LayerPages], slots: Int[Tensor, " n"]
) -> tuple[Shaped[Tensor, "n head_dim"], Shaped[Tensor, "n head_dim"]]:
    """Return key and value of the entry at each slot.

    Args:
        caches: caches of layers of one shape.
        slots: as in `write_entries`.
    """
    first = caches[0]
    if uses_triton(first.device):
        from keepset.kernels.triton import page_entries  # loads Triton

        keys, values = first.new_empty(len(slots), first.shape[3]).chunk(2, -1)
        if len(slots):
            with launched_on(first.device):
                page_entries.move(first, addresses_of(caches), keys, values, slots, into_pages=False)
    else:
        parts = [
            (item_indices, caches[layer][location])
            for layer, item_indices, location in locations_of(first.shape, slots)
        ]
        keys, values = joined(parts, len(slots)).chunk(2, -1)
    return keys, values


def write_entries(
    caches: Sequence[LayerPages],
    keys: Shaped[Tensor, "n head_dim"],
    values: Shaped[Tensor, "n head_dim"],
    slots: Int[Tensor, " n"],
) -> None:
    """Write entry `i` to `slots[i]`.

    Args:
        caches: caches of layers of one shape.
        keys, values: the key and value of each entry.
        slots: distinct slots `subpage * block_size + offset`, where sub-pages are numbered through all caches.
    """
    first = caches[0]
    if not uses_triton(first.device):
        for layer, item_indices, location in locations_of(first.shape, slots):
            of_keys, of_values = caches[layer].chunk(2, -1)
            of_keys[location], of_values[location] = keys[item_indices], values[item_indices]
    elif len(slots):
        from keepset.kernels.triton import page_entries  # loads Triton

        keys, values = (part if part.stride(1) == 1 else part.contiguous() for part in (keys, values))
        with launched_on(first.device):
            page_entries.move(first, addresses_of(caches), keys, values, slots, into_pages=True)


def by_layer(layers: Int[Tensor, " n"]) -> list[tuple[int, Tensor | slice]]:
    """Return each layer among `layers`, with the indices of its items."""
    layer_ids = layers.unique().tolist()
    if len(layer_ids) < 2:  # the usual case
        return [(layer, slice(None)) for layer in layer_ids or [0]]
    return [(layer, (layers == layer).nonzero()[:, 0]) for layer in layer_ids]


def locations_of(
    shape: Sequence[int], slots: Int[Tensor, " n"]
) -> Iterator[tuple[int, Tensor | slice, tuple[Tensor, Tensor, Tensor]]]:
    """Yield each layer among the slots, its entries' indices, and the block, head and offset of each.

    Args:
        shape: `blocks, kv_heads, block_size, ...` of a layer's cache.
        slots: as `write_entries` takes them.
    """
    blocks, kv_heads, size = shape[:3]
    for layer, item_indices in by_layer(slots // (blocks * kv_heads * size)):
        subpage = slots[item_indices] // size
        # Two indices: the strides of blocks and heads need not allow one flat view.
        yield layer, item_indices, (subpage // kv_heads % blocks, subpage % kv_heads, slots[item_indices] % size)


def joined(parts: Sequence[tuple[Tensor | slice, Tensor]], number: int) -> Tensor:
    """Return the parts of several layers as one tensor.

    Args:
        parts: each with the indices of its items in the result.
        number: items of the result.
    """
    if len(parts) == 1:
        return parts[0][1]
    whole = parts[0][1].new_empty(number, *parts[0][1].shape[1:])
    for item_indices, part in parts:
        whole[item_indices] = part
    return whole


def addresses_of(caches: Sequence[LayerPages]) -> Addresses:
    """Return the device addresses at which the caches begin."""
    return _table(tuple(cache.data_ptr() for cache in caches), caches[0].device)


@lru_cache(maxsize=256)
def _table(addresses: tuple[int, ...], device: torch.device) -> Addresses:
    """Return addresses on the device. Caches never move, so each set of them is uploaded once."""
    return Addresses(upload(addresses, device), not any(address % 16 for address in addresses))
