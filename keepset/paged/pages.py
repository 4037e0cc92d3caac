"""Pages of engines that store an entry's numbers in order, and the entries of an event, read from pages on demand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from keepset.core.observation import LazyObservation
from keepset.core.shapes import Scores
from keepset.kernels.dispatch import uses_triton
from keepset.kernels.page_entries import read_keys, read_pages, take_entries, write_entries
from keepset.kernels.page_format import PageFormat, decode_layers, encode_layers
from keepset.kernels.page_layout import ColumnTarget, EntriesInPages, LayerPages, PageGroup, RecordedQueries
from keepset.kernels.predictor import Networks, entry_codes_in_pages
from keepset.kernels.window import add_received_by, add_received_in_pages


@runtime_checkable
class Pages(Protocol):
    """One layer's cache, by sub-pages, in each process that computes.

    A block is `kv_heads` sub-pages, one for each head. The sub-page of a head is `block * kv_heads + head`, and an
    entry's slot is `subpage * block_size + offset`. Numbers continue into the caches of the next layers with the same
    block tables, and after the last into the first, because pages that requests share may be in any of these caches.
    """

    @property
    def slots(self) -> int:
        """The number of entries that the layer's cache has room for."""

    @property
    def head_dim(self) -> int:
        """The size of a key."""

    @property
    def value_dim(self) -> int:
        """The size of a value."""

    @property
    def entry_sizes(self) -> tuple[int, int]:
        """The numbers that an entry holds of a key and of a value, of which one may be part of the other."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of keys and values as they are read."""

    @property
    def entry_bytes(self) -> int:
        """The bytes of an entry's key and value, as they are stored."""

    @property
    def format(self) -> PageFormat | None:
        """How the cache's keys and values are read, and maybe written, if it is quantised, else None."""

    @property
    def device(self) -> torch.device:
        """The device of the cache."""

    @property
    def block_size(self) -> int:
        """The number of entries of a sub-page."""

    def read_keys(self, subpages: Int[Tensor, "*rows pages"]) -> Shaped[Tensor, "*rows entries row"]:
        """Return keys alone, as they are stored.

        Args:
            subpages: the numbers of whole sub-pages, in the order of the entries.
        """

    def read(
        self, subpages: Int[Tensor, "*rows pages"]
    ) -> tuple[Shaped[Tensor, "*rows entries row"], Shaped[Tensor, "*rows entries row"]]:
        """Return the keys and values of whole sub-pages, each row's pages joined.

        Args:
            subpages: their numbers, in the order of the entries.

        Returns:
            Keys and values as they are stored: plain numbers, or rows of a `PageFormat`. `entries` is
            `pages * block_size`. After a head's own entries comes whatever the page held before.
        """

    def write(self, keys: Shaped[Tensor, "n row"], values: Shaped[Tensor, "n row"], slots: Int[Tensor, " n"]) -> None:
        """Write entry `i` to `slots[i]`.

        Args:
            keys, values: after rotation, as they are stored.
            slots: distinct and inside the cache: kernels check neither.
        """


class StridedPages:
    """`Pages` of backends that store an entry's numbers in order, at any strides, as those for GPUs do.

    Args:
        caches: the caches of all layers with the same block tables.
        place: which of them is the layer's.
        format: how the cache is read and written if it is quantised, else None.
    """

    def __init__(self, caches: Sequence[LayerPages], layer_index: int = 0, format: PageFormat | None = None) -> None:
        self.caches, self.place, self.format, cache = caches, layer_index, format, caches[layer_index]
        self._moved = caches
        if format is not None and format.row_bytes % 4 == 0:  # four bytes at a time
            self._moved = [cache.view(torch.int32) for cache in caches]
        blocks, self.kv_heads, self.block_size, width = cache.shape
        self.slots = blocks * self.kv_heads * self.block_size
        self.entry_bytes, self.device = width * cache.itemsize, cache.device
        self.head_dim = self.value_dim = width // 2 if format is None else format.head_dim
        self.entry_sizes = self.head_dim, self.value_dim
        self.dtype = cache.dtype if format is None else format.dtype

    def read_rows(self, subpages: Int[Tensor, "*rows pages"]) -> Shaped[Tensor, "*rows entries width"]:
        """Return the entries of whole sub-pages, as they are stored: all numbers of each."""
        return read_pages(self._moved, self.place, subpages)

    def read_keys(self, subpages: Int[Tensor, "*rows pages"]) -> Shaped[Tensor, "*rows entries row"]:
        """Return the keys of whole sub-pages, as they are stored."""
        return read_keys(self._moved, self.place, subpages)

    def read(
        self, subpages: Int[Tensor, "*rows pages"]
    ) -> tuple[Shaped[Tensor, "*rows entries row"], Shaped[Tensor, "*rows entries row"]]:
        """Return keys and values of whole sub-pages, as they are stored: halves of one tensor."""
        keys, values = self.read_rows(subpages).chunk(2, dim=-1)
        return keys, values

    def write(self, keys: Shaped[Tensor, "n row"], values: Shaped[Tensor, "n row"], slots: Int[Tensor, " n"]) -> None:
        """Write entry `i` to `slots[i]`.

        Args:
            keys: keys after rotation, as they are stored; bytes are taken as well if the cache is quantised.
            values: values, likewise.
            slots: the slot of each entry; distinct.
        """
        if self.format is not None:
            keys, values = (rows.view(self._moved[0].dtype) for rows in (keys, values))
        write_entries(self._moved, keys, values, self._through(slots))

    def take(self, slots: Int[Tensor, " n"]) -> tuple[Shaped[Tensor, "n row"], Shaped[Tensor, "n row"]]:
        """Return the key and value of the entry at each of these slots, as they are stored."""
        return take_entries(self._moved, self._through(slots))

    def _through(self, slots: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Return slots counted from the first layer's first slot."""
        return (self.place * self.slots + slots) % (len(self.caches) * self.slots)


def decoded_keys(pages: Pages, subpages: Int[Tensor, "*rows pages"]) -> Float[Tensor, "*rows entries head_dim"]:
    """Return the keys of whole sub-pages of a layer, in their own type.

    Args:
        pages: the layer's cache.
        subpages: numbers of whole sub-pages.
    """
    keys, format = pages.read_keys(subpages), pages.format
    return keys if format is None else format.decode(keys, format.key_scale)


def decoded_entries(
    pages: Pages, subpages: Int[Tensor, "*rows pages"]
) -> tuple[Float[Tensor, "*rows entries head_dim"], Float[Tensor, "*rows entries head_dim"]]:
    """Return the keys and values of whole sub-pages of a layer, in their own type.

    Args:
        pages: the layer's cache.
        subpages: numbers of whole sub-pages.
    """
    (keys, values), format = pages.read(subpages), pages.format
    return (keys, values) if format is None else format.decode_entries(keys, values)


def add_received(
    pages: Sequence[Pages],
    layer_indices: range,
    queries: RecordedQueries,
    entries: EntriesInPages,
    received: ColumnTarget,
) -> None:
    """Add the attention that entries receive from queries to a column, in some neighbouring layers.

    Args:
        pages: the cache of each layer.
        layer_indices: the layers, by their places in the group.
        queries: the queries.
        entries: where the entries lie.
        received: the column that is added to.
    """
    first = pages[0]
    if isinstance(first, StridedPages) and first.value_dim == first.head_dim:
        formats = [layer.format for layer in pages if layer.format is not None]
        add_received_in_pages(first.caches, layer_indices, queries, entries, received, formats)
        return
    kv_heads = entries.packed.shape[2]
    group = PageGroup(layer_indices, len(received.column), first.slots // (kv_heads * first.block_size))
    add_received_by(
        [partial(decoded_keys, layer) for layer in pages], first.block_size, group, queries, entries, received
    )


WORKSPACE = 1 << 26
"""Bytes of entries that are copied out of pages at a time, if they are of more than one head: 64 MiB."""


class PagedEntries:
    """The entries of some sub-pages of several layers, layer after layer and row after row.

    Args:
        pages: the cache of the group's first layer, from which on sub-pages are numbered.
        subpages: the sub-pages of each head, in the order of its entries.
        formats: how each layer is read, if the cache is quantised.

    Attributes:
        pages, subpages: as given.
        shape: `[layers_rows, kv_heads, entries]`, including the unused slots of the last pages.
    """

    def __init__(
        self, pages: Pages, subpages: Int[Tensor, "layers_rows kv_heads pages"], formats: Sequence[PageFormat] = ()
    ) -> None:
        self.pages, self.subpages, self._formats = pages, subpages, formats
        rows, kv_heads, number = subpages.shape
        self.shape = torch.Size((rows, kv_heads, number * pages.block_size))
        self._few = self.shape.numel() * pages.entry_bytes <= WORKSPACE

    def keys(self, heads: slice) -> Float[Tensor, "layers_rows heads entries head_dim"]:
        """Return the keys of some KV heads. If all heads fit the workspace, they are read together, once."""
        stored = self._all[0][:, heads] if self._few else self.pages.read_keys(self.subpages[:, heads])
        return decode_layers(self._formats, stored, values=False) if self._formats else stored

    def values(self, heads: slice) -> Float[Tensor, "layers_rows heads entries head_dim"]:
        """Return the values of some KV heads."""
        stored = self._all[1][:, heads] if self._few else self.pages.read(self.subpages[:, heads])[1]
        return decode_layers(self._formats, stored, values=True) if self._formats else stored

    def encoded_values(self, values: Float[Tensor, "n head_dim"], heads: Int[Tensor, " n"]) -> Shaped[Tensor, "n row"]:
        """Return values as the cache stores them, as bytes if it is quantised.

        Args:
            values: in the type that values are read as.
            heads: the head of each, counted through all layers and rows.
        """
        if not self._formats:
            return values
        of_layer = self.subpages.shape[:2].numel() // len(self._formats)
        return encode_layers(self._formats, values, heads // of_layer, values=True)

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        return self.pages.read(self.subpages)

    def codes_by(
        self,
        positions: Int[Tensor, "layers_rows kv_heads some"],
        new: Bool[Tensor, "layers_rows kv_heads some"],
        networks: Networks,
        known_scores: Scores | None,
    ) -> Scores | None:
        """Return the codes of the first entries, read in the pages; None if the pages would have to be copied.

        Args:
            positions, new, networks, known: as in `entry_codes_in_pages`.
        """
        pages = self.pages
        if not isinstance(pages, StridedPages) or not uses_triton(pages.device) or pages.value_dim != pages.head_dim:
            return None
        where = pages.caches, pages.place, self.subpages
        return entry_codes_in_pages(*where, positions, new, networks, known_scores, self._formats)

    def take(self, heads: range, index: Int[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some entries, as they are stored.

        Args:
            heads: the heads, counted through all layers and rows.
            index: the entries, `head * entries + place` with `entries` of `shape`.
        """
        if isinstance(self.pages, StridedPages):
            size = self.pages.block_size
            slots = self.subpages.flatten().index_select(0, index // size) * size + index % size
            return self.pages.take(slots)
        if self._few:
            keys, values = (part.flatten(0, 2) for part in self._all)
        else:
            subpages = self.subpages.flatten(0, 1)[heads.start : heads.stop]
            keys, values = (part.flatten(0, 1) for part in self.pages.read(subpages))
            index = index - heads.start * self.shape[2]
        return keys.index_select(0, index), values.index_select(0, index)


class PagedObservation(LazyObservation):
    """An observation of the first entries of each head; reading `keys` or `values` copies all of them."""

    moved_as_stored = True
    _entries: PagedEntries

    def __init__(self, entries: PagedEntries, width: int, **parts: Any) -> None:
        pages, shape = entries.pages, (*entries.shape[:2], width)
        sizes = pages.head_dim, pages.value_dim
        super().__init__(shape, *sizes, pages.dtype, pages.device, entry_sizes=pages.entry_sizes, **parts)
        vars(self)["_entries"] = entries

    def keys_of(self, heads: slice) -> Float[Tensor, "batch heads entries head_dim"]:
        return self._entries.keys(heads)[:, :, : self.valid.shape[2]]

    def values_of(self, heads: slice) -> Float[Tensor, "batch heads entries value_dim"]:
        return self._entries.values(heads)[:, :, : self.valid.shape[2]]

    def _codes_in_place(
        self, new: Bool[Tensor, "batch kv_heads entries"], networks: Networks, known_scores: Scores | None
    ) -> Scores | None:
        return self._entries.codes_by(self.positions, new, networks, known_scores)
