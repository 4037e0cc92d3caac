"""Reading entries from the pages of several layers, and writing them back; on a GPU in one launch for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from jaxtyping import Int, Shaped, UInt8
from torch import Tensor

from keepset.kernels.dispatch import launched_on, upload, uses_triton
from keepset.kernels.entry_parts import TOKENS, EntryParts, LayerPages, pages_of
from keepset.kernels.paged_arguments import Addresses

LayerCaches = Sequence[LayerPages] | Sequence[EntryParts]
"""The caches of layers of one shape that share block tables: rows, or views of the bytes of entries."""


def read_keys(
    caches: LayerCaches, place: int, subpages: Int[Tensor, "*rows pages"]
) -> Shaped[Tensor, "*rows entries row"]:
    """Return the stored keys of whole sub-pages; see `read_pages`."""
    if parts := _parts(caches):
        return _read_parts(parts, place, subpages, 0)
    pages = [pages_of(cache) for cache in caches]
    return read_pages([cache[..., : cache.shape[3] // 2] for cache in pages], place, subpages)


def read_entries(
    caches: LayerCaches, place: int, subpages: Int[Tensor, "*rows pages"]
) -> tuple[Shaped[Tensor, "*rows entries key_row"], Shaped[Tensor, "*rows entries value_row"]]:
    """Return the stored keys and values of whole sub-pages; see `read_pages`."""
    if parts := _parts(caches):
        return _read_parts(parts, place, subpages, 0), _read_parts(parts, place, subpages, 1)
    keys, values = read_pages([pages_of(cache) for cache in caches], place, subpages).chunk(2, -1)
    return keys, values


def read_pages(
    caches: Sequence[LayerPages], place: int, subpages: Int[Tensor, "*rows pages"]
) -> Shaped[Tensor, "*rows entries width"]:
    """Return the entries of whole sub-pages, each row's pages joined.

    Args:
        caches: caches of layers of one shape that share block tables.
        place: index of the layer whose first sub-page is number 0.
        subpages: numbers of the sub-pages, in the order of the entries. The numbering continues into the following
            caches, and from the last cache into the first.
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
    parts = [
        (own, _pages(caches[layer % len(caches)], subpages[own] % number))
        for layer, own in by_layer(place + subpages // number)
    ]
    return joined(parts, len(subpages)).reshape(*rows, pages * size, width)


def _pages(cache: LayerPages, subpages: Int[Tensor, " n"]) -> Shaped[Tensor, "n block_size width"]:
    """Return whole sub-pages of one layer."""
    if cache.stride(0) == cache.shape[1] * cache.stride(1):
        return cache.flatten(0, 1).index_select(0, subpages)  # twice as fast as by two indices
    return cache[subpages // cache.shape[1], subpages % cache.shape[1]]


def take_entries(
    caches: Sequence[LayerPages], slots: Int[Tensor, " n"]
) -> tuple[Shaped[Tensor, "n head_dim"], Shaped[Tensor, "n head_dim"]]:
    """Return key and value of the entry at each slot."""
    first = caches[0]
    if uses_triton(first.device):
        from keepset.kernels.triton import page_entries  # loads Triton

        keys, values = first.new_empty(len(slots), first.shape[3]).chunk(2, -1)
        if len(slots):
            with launched_on(first.device):
                page_entries.move(first, addresses_of(caches), keys, values, slots, into_pages=False)
    else:
        parts = [(own, caches[layer][place]) for layer, own, place in places_of(first.shape, slots)]
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
        for layer, own, place in places_of(first.shape, slots):
            of_keys, of_values = caches[layer].chunk(2, -1)
            of_keys[place], of_values[place] = keys[own], values[own]
    elif len(slots):
        from keepset.kernels.triton import page_entries  # loads Triton

        keys, values = (part if part.stride(1) == 1 else part.contiguous() for part in (keys, values))
        with launched_on(first.device):
            page_entries.move(first, addresses_of(caches), keys, values, slots, into_pages=True)


def write_parts(
    parts: Sequence[EntryParts],
    keys: UInt8[Tensor, "n key_row"],
    values: UInt8[Tensor, "n value_row"],
    slots: Int[Tensor, " n"],
) -> None:
    """Write entry `i` to `slots[i]`, byte by byte.

    Args:
        parts: views of the bytes of entries, for caches of layers of one shape.
        keys, values, slots: as in `write_entries`.
    """
    shape = parts[0].numbers.shape
    for layer, own, (block, head, offset) in places_of(shape, slots):
        for rows, side in zip((keys, values), parts[layer], strict=True):
            widths = [part.shape[4:].numel() for part in side]
            for part, bytes_of_part in zip(side, rows[own].split(widths, -1), strict=True):
                part[block, head, offset // TOKENS, offset % TOKENS] = bytes_of_part.unflatten(-1, part.shape[4:])


def _parts(caches: LayerCaches) -> list[EntryParts]:
    """Return the caches if they are views of bytes, else an empty list."""
    return [cache for cache in caches if isinstance(cache, EntryParts)]


def _read_parts(
    parts: Sequence[EntryParts], place: int, subpages: Int[Tensor, "*rows pages"], side: int
) -> UInt8[Tensor, "*rows entries row"]:
    """Return the keys of whole sub-pages (side 0), or their values (side 1)."""
    blocks, kv_heads, size, _ = parts[0].numbers.shape
    width = sum(view.shape[4:].numel() for view in parts[0][side])
    (*rows, pages), flat, read = subpages.shape, subpages.flatten().long(), []
    for layer, own in by_layer(flat // (blocks * kv_heads)):
        block, head = flat[own] // kv_heads % blocks, flat[own] % kv_heads
        views = parts[(place + layer) % len(parts)][side]
        read.append((own, torch.cat([view[block, head].flatten(3) for view in views], -1)))
    return joined(read, len(flat)).reshape(*rows, pages * size, width)


def by_layer(layers: Int[Tensor, " n"]) -> list[tuple[int, Tensor | slice]]:
    """Return each layer among `layers`, with the indices of its items."""
    some = layers.unique().tolist()
    if len(some) < 2:  # the usual case
        return [(layer, slice(None)) for layer in some or [0]]
    return [(layer, (layers == layer).nonzero()[:, 0]) for layer in some]


def places_of(
    shape: Sequence[int], slots: Int[Tensor, " n"]
) -> Iterator[tuple[int, Tensor | slice, tuple[Tensor, Tensor, Tensor]]]:
    """Yield each layer among the slots, its entries' indices, and the block, head and offset of each.

    Args:
        shape: `blocks, kv_heads, block_size, ...` of a layer's cache.
        slots: as `write_entries` takes them.
    """
    blocks, kv_heads, size = shape[:3]
    for layer, own in by_layer(slots // (blocks * kv_heads * size)):
        place = slots[own] // size
        # Two indices: the strides of blocks and heads need not allow one flat view.
        yield layer, own, (place // kv_heads % blocks, place % kv_heads, slots[own] % size)


def joined(parts: Sequence[tuple[Tensor | slice, Tensor]], number: int) -> Tensor:
    """Return the parts of several layers as one tensor."""
    if len(parts) == 1:
        return parts[0][1]
    whole = parts[0][1].new_empty(number, *parts[0][1].shape[1:])
    for own, part in parts:
        whole[own] = part
    return whole


def addresses_of(caches: LayerCaches) -> Addresses:
    """Return the device addresses at which the caches begin."""
    # Every layer of every step calls this, so no views are made.
    first = [cache.keys[0] if isinstance(cache, EntryParts) else cache for cache in caches]
    return _table(tuple(cache.data_ptr() for cache in first), first[0].device)


@lru_cache(maxsize=256)
def _table(addresses: tuple[int, ...], device: torch.device) -> Addresses:
    """Return addresses on the device. Caches never move, so each set of them is uploaded once."""
    return Addresses(upload(addresses, device), not any(address % 16 for address in addresses))
