"""Pages of engines that keep an entry's numbers in order, and an event's entries, which stay there until read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.kernels.dispatch import uses_triton
from keepset.kernels.page_entries import read_pages, take_entries, write_entries
from keepset.kernels.page_layout import PageGroup
from keepset.kernels.paged_arguments import ColumnTarget, EntriesInPages, RecordedQueries
from keepset.kernels.paged_window import add_received_by, add_received_in_pages
from keepset.kernels.predictor import Networks, entry_scores_in_pages

if TYPE_CHECKING:
    from keepset.paged.engine import Pages


@dataclass(frozen=True, eq=False)
class EightBits:
    """How a layer's numbers of 8 bits are read.

    Attributes:
        kind: the type of the stored numbers.
        keys, values: the scales of keys and of values. They are looked up whenever the cache is read.
        dtype: the type that they are read as.
    """

    kind: torch.dtype
    keys: Float[Tensor, ""]
    values: Float[Tensor, ""]
    dtype: torch.dtype

    def read(self, numbers: Tensor, scale: Float[Tensor, "*shape"]) -> Float[Tensor, "*rows entries head_dim"]:
        """Return what stored numbers stand for."""
        return numbers.view(self.kind).to(self.dtype).mul_(scale)


class StridedPages:
    """Pages of backends that keep an entry's numbers in order, at any strides: those for GPUs.

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
    """Add the attention that entries get from queries, in some neighbouring layers."""
    first = pages[0]
    if isinstance(first, StridedPages) and first.eight_bits is None:
        add_received_in_pages(first.caches, places, queries, entries, received)
        return
    kv_heads = entries.packed.shape[2]
    group = PageGroup(places, len(received.column), first.slots // (kv_heads * first.block_size))
    add_received_by([layer.read_keys for layer in pages], first.block_size, group, queries, entries, received)


WORKSPACE = 1 << 26
"""Bytes of entries that are copied out of pages at a time, if they are of more than one head: 64 MiB."""


class PagedEntries:
    """The entries of some sub-pages of several layers, layer after layer and row after row.

    Args:
        pages: the cache of the group's first layer, from which on sub-pages are numbered.
        subpages: the sub-pages of each head, in the order of its entries.
        scales: how each layer is read, where numbers have 8 bits.

    Attributes:
        pages: as given.
        shape: `[layers_rows, kv_heads, entries]`, with what lies behind the entries in their last page.
    """

    def __init__(
        self, pages: Pages, subpages: Int[Tensor, "layers_rows kv_heads pages"], scales: Sequence[EightBits] = ()
    ) -> None:
        self.pages, self._subpages, self._scales = pages, subpages, scales
        rows, kv_heads, number = subpages.shape
        self.shape = torch.Size((rows, kv_heads, number * pages.block_size))
        self._few = self.shape.numel() * pages.entry_bytes <= WORKSPACE

    def keys(self, heads: slice) -> Float[Tensor, "layers_rows heads entries head_dim"]:
        """Return the keys of some KV heads. If all heads fit the workspace, they are read once."""
        if self._few or self._scales:
            return self._meant(self._stored(heads)[0], [one.keys for one in self._scales])
        return self.pages.read_keys(self._subpages[:, heads])

    def values(self, heads: slice) -> Float[Tensor, "layers_rows heads entries head_dim"]:
        """Return the values of some KV heads."""
        return self._meant(self._stored(heads)[1], [one.values for one in self._scales])

    def _stored(self, heads: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are stored."""
        if not self._few:
            return self.pages.read(self._subpages[:, heads])
        keys, values = self._all
        return keys[:, heads], values[:, heads]

    def _meant(self, stored: Tensor, scales: Sequence[Tensor]) -> Tensor:
        """Return stored keys or values in their own type; each layer has its scale."""
        if not scales:
            return stored
        of_rows = torch.stack(list(scales)).repeat_interleave(len(stored) // len(scales))
        return self._scales[0].read(stored, of_rows[:, None, None, None])

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        return self.pages.read(self._subpages)

    def predicted(
        self,
        positions: Int[Tensor, "layers_rows kv_heads some"],
        new: Bool[Tensor, "layers_rows kv_heads some"],
        networks: Networks,
        known: Scores | None,
    ) -> Scores | None:
        """Return the scores of the first entries, read where they lie; None where pages have to be copied for that.

        Args:
            positions, new, networks, known: as in `entry_scores_in_pages`.
        """
        pages = self.pages
        if self._scales or not isinstance(pages, StridedPages) or not uses_triton(pages.device):
            return None
        return entry_scores_in_pages(pages.caches, pages.place, self._subpages, positions, new, networks, known)

    def take(self, heads: range, index: Int[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        """Return keys and values of entries of some heads, as they are stored."""
        if isinstance(self.pages, StridedPages):
            size = self.pages.block_size
            slots = self._subpages.flatten().index_select(0, index // size) * size + index % size
            return self.pages.take(slots)
        if self._few:
            keys, values = (part.flatten(0, 2) for part in self._all)
        else:
            own = self._subpages.flatten(0, 1)[heads.start : heads.stop]
            keys, values = (part.flatten(0, 1) for part in self.pages.read(own))
            index = index - heads.start * self.shape[2]
        return keys.index_select(0, index), values.index_select(0, index)


class PagedObservation(Observation):
    """An observation of the first entries of each head; reading `keys` or `values` copies all of them."""

    _entries: PagedEntries

    def __init__(self, entries: PagedEntries, width: int, **parts: Any) -> None:
        pages = entries.pages
        # Tensors of the right shape that take no memory.
        nothing = torch.empty((), dtype=pages.dtype, device=pages.device)
        nothing = nothing.expand(*entries.shape[:2], width, pages.head_dim)
        super().__init__(keys=nothing, values=nothing, **parts)
        own = vars(self)
        del own["keys"], own["values"]
        own["_entries"] = entries

    @cached_property
    def keys(self) -> Float[Tensor, "batch kv_heads entries head_dim"]:  # type: ignore[override]
        return self.keys_of(slice(None))

    @cached_property
    def values(self) -> Float[Tensor, "batch kv_heads entries value_dim"]:  # type: ignore[override]
        return self.values_of(slice(None))

    def keys_of(self, heads: slice) -> Float[Tensor, "batch heads entries head_dim"]:
        return self._entries.keys(heads)[:, :, : self.valid.shape[2]]

    def values_of(self, heads: slice) -> Float[Tensor, "batch heads entries value_dim"]:
        return self._entries.values(heads)[:, :, : self.valid.shape[2]]

    def _predicted_in_place(
        self, new: Bool[Tensor, "batch kv_heads entries"], networks: Networks, known: Scores | None
    ) -> Scores | None:
        return self._entries.predicted(self.positions, new, networks, known)

    @property
    def dtype(self) -> torch.dtype:
        return self._entries.pages.dtype

    @property
    def head_dim(self) -> int:
        return self._entries.pages.head_dim

    @property
    def value_dim(self) -> int:
        return self._entries.pages.head_dim

    @property
    def entry_bytes(self) -> int:
        return self._entries.pages.entry_bytes
