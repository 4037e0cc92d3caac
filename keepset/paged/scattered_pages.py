"""Pages in which the bytes of an entry lie in several places, and are moved as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from keepset.kernels.entry_parts import TOKENS, EntryParts
from keepset.kernels.packed_formats import PackedFormat
from keepset.kernels.page_entries import by_layer, joined, places_of


class ScatteredPages:
    """Pages of a cache that an engine's own kernels write and attend to: keepset moves entries, and reads them.

    Args:
        parts: where entries lie, in the caches of all layers with the same block tables.
        place: which of them is the layer's.
        format: how the layer's keys and values are read.

    Attributes:
        format: as given.
        kv_heads, block_size, head_dim, value_dim, slots, entry_bytes, dtype, device: of the layer's cache, as `Pages`
            has them.
    """

    def __init__(self, parts: Sequence[EntryParts], place: int, format: PackedFormat) -> None:
        self._parts, self._place, self.format, first = parts, place, format, parts[place].keys[0]
        self._blocks, self.kv_heads, self.block_size = *first.shape[:2], first.shape[2] * TOKENS
        self.slots = self._blocks * self.kv_heads * self.block_size
        self._widths = tuple([part.shape[4:].numel() for part in side] for side in parts[place])
        self.entry_bytes = sum(map(sum, self._widths))
        self.head_dim = self.value_dim = format.head_dim
        self.dtype, self.device = format.dtype, first.device

    def read_keys(self, subpages: Int[Tensor, "*rows pages"]) -> UInt8[Tensor, "*rows entries row"]:
        """Return the keys of whole sub-pages, as they are stored."""
        return self._read(subpages, 0)

    def read(
        self, subpages: Int[Tensor, "*rows pages"]
    ) -> tuple[UInt8[Tensor, "*rows entries key_row"], UInt8[Tensor, "*rows entries value_row"]]:
        """Return keys and values of whole sub-pages, as they are stored."""
        return self._read(subpages, 0), self._read(subpages, 1)

    def write(
        self, keys: UInt8[Tensor, "n key_row"], values: UInt8[Tensor, "n value_row"], slots: Int[Tensor, " n"]
    ) -> None:
        """Write entry `i` to `slots[i]`.

        Args:
            keys, values: as they are stored.
            slots: the slot of each entry; distinct.
        """
        shape = self._blocks, self.kv_heads, self.block_size
        for layer, own, (block, head, offset) in places_of(shape, slots):
            cache = self._parts[(self._place + layer) % len(self._parts)]
            for rows, side, widths in zip((keys, values), cache, self._widths, strict=True):
                for part, bytes_of_part in zip(side, rows[own].split(widths, -1), strict=True):
                    part[block, head, offset // TOKENS, offset % TOKENS] = bytes_of_part.unflatten(-1, part.shape[4:])

    def _read(self, subpages: Int[Tensor, "*rows pages"], side: int) -> UInt8[Tensor, "*rows entries row"]:
        """Return the keys of whole sub-pages (side 0), or their values (side 1)."""
        (*rows, pages), flat, read = subpages.shape, subpages.flatten().long(), []
        for layer, own in by_layer(flat // (self._blocks * self.kv_heads)):
            block, head = flat[own] // self.kv_heads % self._blocks, flat[own] % self.kv_heads
            cache = self._parts[(self._place + layer) % len(self._parts)]
            read.append((own, torch.cat([part[block, head].flatten(3) for part in cache[side]], -1)))
        return joined(read, len(flat)).reshape(*rows, pages * self.block_size, sum(self._widths[side]))
