"""Pages in which the bytes of an entry are in several places, and are moved bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Int, UInt8
from torch import Tensor

from keepset.kernels.entry_parts import EntryParts
from keepset.kernels.packed_formats import PackedFormat
from keepset.kernels.page_entries import read_entries, read_keys, write_parts


class ScatteredPages:
    """Pages of a cache that stores keys and values differently, or an entry in several places.

    Args:
        caches: where entries lie, in the caches of all layers with the same block tables.
        place: which of them is the layer's.
        format: how the layer's keys and values are read and written.

    Attributes:
        caches, place, format: as given.
        kv_heads, block_size, head_dim, value_dim, slots, entry_bytes, dtype, device: of the layer's cache, as `Pages`
            has them.
    """

    def __init__(self, caches: Sequence[EntryParts], place: int, format: PackedFormat) -> None:
        self.caches, self.place, self.format = caches, place, format
        numbers = caches[place].numbers
        blocks, self.kv_heads, self.block_size, _ = numbers.shape
        self.slots = blocks * self.kv_heads * self.block_size
        self.entry_bytes = sum(part.shape[4:].numel() for side in caches[place] for part in side)
        self.head_dim = self.value_dim = format.head_dim
        self.dtype, self.device = format.dtype, numbers.device

    def read_keys(self, subpages: Int[Tensor, "*rows pages"]) -> UInt8[Tensor, "*rows entries row"]:
        """Return the keys of whole sub-pages, as they are stored."""
        return read_keys(self.caches, self.place, subpages)

    def read(
        self, subpages: Int[Tensor, "*rows pages"]
    ) -> tuple[UInt8[Tensor, "*rows entries key_row"], UInt8[Tensor, "*rows entries value_row"]]:
        """Return keys and values of whole sub-pages, as they are stored."""
        return read_entries(self.caches, self.place, subpages)

    def write(
        self, keys: UInt8[Tensor, "n key_row"], values: UInt8[Tensor, "n value_row"], slots: Int[Tensor, " n"]
    ) -> None:
        """Write entry `i` to `slots[i]`.

        Args:
            keys, values: as they are stored.
            slots: the slot of each entry; distinct.
        """
        write_parts(self.caches, keys, values, (self.place * self.slots + slots) % (len(self.caches) * self.slots))
