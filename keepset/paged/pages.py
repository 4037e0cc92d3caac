"""Pages of engines that keep an entry's numbers in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.kernels.page_entries import read_pages, write_entries
from keepset.kernels.paged_window import (
    EntriesInPages,
    Received,
    RecordedQueries,
    add_received_by,
    add_received_in_pages,
)

if TYPE_CHECKING:
    from keepset.paged.engine import Pages


class StridedPages:
    """Pages of backends that keep an entry's numbers in order, at any strides: those for GPUs.

    Attributes:
        kv_heads, block_size, head_dim, slots, device: of the cache.
        entry_bytes: of an entry's key and value.
        cache: it.
    """

    def __init__(self, kv_cache: Float[Tensor, "blocks kv_heads block_size two_head_dim"]) -> None:
        blocks, self.kv_heads, self.block_size, width = kv_cache.shape
        self.head_dim, self.slots = width // 2, blocks * self.kv_heads * self.block_size
        self.entry_bytes = width * kv_cache.itemsize
        self.cache, self.device = kv_cache, kv_cache.device

    def read_keys(self, subpages: Int[Tensor, "*rows pages"]) -> Float[Tensor, "*rows entries head_dim"]:
        """Keys of whole sub-pages."""
        block, head = self._block_and_head(subpages)
        return self.cache[block, head, :, : self.head_dim].flatten(-3, -2)

    def read(
        self, subpages: Int[Tensor, "*rows pages"]
    ) -> tuple[Float[Tensor, "*rows entries head_dim"], Float[Tensor, "*rows entries head_dim"]]:
        """Keys and values of whole sub-pages: halves of one tensor."""
        entries = self.cache[self._block_and_head(subpages)].flatten(-3, -2)
        return entries[..., : self.head_dim], entries[..., self.head_dim :]

    def write(
        self, keys: Float[Tensor, "n head_dim"], values: Float[Tensor, "n head_dim"], slots: Int[Tensor, " n"]
    ) -> None:
        """Puts entry `i` at `slots[i]`."""
        place = (*self._block_and_head(slots // self.block_size), slots % self.block_size)
        self.cache[place] = torch.cat((keys, values), dim=-1)

    def _block_and_head(self, subpages: Int[Tensor, "*rows"]) -> tuple[Int[Tensor, "*rows"], Int[Tensor, "*rows"]]:
        # Not one index into a folded view: blocks and heads need not have strides that fold.
        return subpages // self.kv_heads, subpages % self.kv_heads


def read_layers(
    pages: Sequence[Pages], subpages: Int[Tensor, "rows kv_heads pages"]
) -> tuple[Float[Tensor, "layers_rows kv_heads n head_dim"], Float[Tensor, "layers_rows kv_heads n head_dim"]]:
    """Keys and values of the same whole sub-pages of several layers, layer after layer."""
    if caches := _strided(pages):
        entries = read_pages(caches, subpages)
        keys, values = entries.chunk(2, dim=-1)
        return keys, values
    if len(pages) == 1:
        return pages[0].read(subpages)
    each = zip(*(layer.read(subpages) for layer in pages), strict=True)
    keys, values = map(torch.cat, each)
    return keys, values


def write_layers(
    pages: Sequence[Pages],
    keys: Float[Tensor, "n head_dim"],
    values: Float[Tensor, "n head_dim"],
    layers: Int[Tensor, " n"],
    slots: Int[Tensor, " n"],
) -> None:
    """Puts entry `i` at `slots[i]` of layer `layers[i]`, counted among these."""
    if caches := _strided(pages):
        write_entries(caches, torch.cat((keys, values), dim=-1), layers, slots)
    elif len(pages) == 1:
        pages[0].write(keys, values, slots)
    else:
        for place, layer in enumerate(pages):
            own = (layers == place).nonzero()[:, 0]
            layer.write(keys[own], values[own], slots[own])


def add_received(
    pages: Sequence[Pages], queries: RecordedQueries, entries: EntriesInPages, received: Received, first: int
) -> None:
    """Adds what entries receive of queries in some layers of a group, the first of which has this place in it."""
    if caches := _strided(pages):
        add_received_in_pages(caches, queries, entries, received, first)
    else:
        readers = [layer.read_keys for layer in pages]
        add_received_by(readers, pages[0].block_size, queries, entries, received, first)


def _strided(pages: Sequence[Pages]) -> list[Tensor]:
    """The caches, if all are of that kind."""
    caches = [layer.cache for layer in pages if isinstance(layer, StridedPages)]
    return caches if len(caches) == len(pages) else []
