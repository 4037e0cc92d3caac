"""Pages of engines that keep an entry's numbers in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float, Int, Shaped
from torch import Tensor

from keepset.kernels.page_entries import read_pages, take_entries, write_entries
from keepset.kernels.page_layout import PageGroup
from keepset.kernels.paged_arguments import ColumnTarget, EntriesInPages, RecordedQueries
from keepset.kernels.paged_window import add_received_by, add_received_in_pages

if TYPE_CHECKING:
    from keepset.paged.engine import Pages
    from keepset.paged.fp8 import EightBits


class StridedPages:
    """Pages of backends that keep an entry's numbers in order, at any strides: those for GPUs.

    Args:
        caches: the caches of the layers that share block tables.
        place: the layer's place among them.
        eight_bits: how the cache is read, if its numbers have 8 bits.

    Attributes:
        caches, place, eight_bits: as given.
        kv_heads, block_size, head_dim, slots, entry_bytes, dtype, device: of the layer's cache, as `Pages` has them.
    """

    def __init__(
        self,
        caches: Sequence[Shaped[Tensor, "blocks kv_heads block_size two_head_dim"]],
        place: int = 0,
        eight_bits: EightBits | None = None,
    ) -> None:
        self.caches, self.place, self.eight_bits, cache = caches, place, eight_bits, caches[place]
        blocks, self.kv_heads, self.block_size, width = cache.shape
        self.head_dim, self.slots = width // 2, blocks * self.kv_heads * self.block_size
        self.entry_bytes, self.device = width * cache.itemsize, cache.device
        self.dtype = cache.dtype if eight_bits is None else eight_bits.dtype

    def read_keys(self, subpages: Int[Tensor, "*rows pages"]) -> Float[Tensor, "*rows entries head_dim"]:
        """Return the keys of whole sub-pages."""
        keys = read_pages([cache[..., : self.head_dim] for cache in self.caches], self.place, subpages)
        return keys if self.eight_bits is None else self.eight_bits.read(keys, self.eight_bits.keys)

    def read(
        self, subpages: Int[Tensor, "*rows pages"]
    ) -> tuple[Shaped[Tensor, "*rows entries head_dim"], Shaped[Tensor, "*rows entries head_dim"]]:
        """Return keys and values of whole sub-pages, as they are stored: halves of one tensor."""
        keys, values = read_pages(self.caches, self.place, subpages).chunk(2, dim=-1)
        return keys, values

    def write(
        self, keys: Shaped[Tensor, "n head_dim"], values: Shaped[Tensor, "n head_dim"], slots: Int[Tensor, " n"]
    ) -> None:
        """Write entry `i` to `slots[i]`."""
        write_entries(self.caches, keys, values, self._through(slots))

    def take(self, slots: Int[Tensor, " n"]) -> tuple[Shaped[Tensor, "n head_dim"], Shaped[Tensor, "n head_dim"]]:
        """Return the key and value of the entry at each of these slots."""
        return take_entries(self.caches, self._through(slots))

    def _through(self, slots: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Return slots as they are counted from the first layer's on."""
        return (self.place * self.slots + slots) % (len(self.caches) * self.slots)


def add_received(
    pages: Sequence[Pages], places: range, queries: RecordedQueries, entries: EntriesInPages, received: ColumnTarget
) -> None:
    """Add the attention that entries get from queries, in some neighbouring layers.

    Args:
        pages: the caches of these layers.
        places: the layers, by their places in the group.
        queries: the queries.
        entries: where the entries lie.
        received: what is added up, and where to.
    """
    first = pages[0]
    if isinstance(first, StridedPages) and first.eight_bits is None:
        add_received_in_pages(first.caches, places, queries, entries, received)
        return
    kv_heads = entries.packed.shape[2]
    group = PageGroup(places, len(received.column), first.slots // (kv_heads * first.block_size))
    add_received_by([layer.read_keys for layer in pages], first.block_size, group, queries, entries, received)
