"""An event's entries, which stay in their pages until a method reads them or they are moved."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.observation import Observation
from keepset.paged.engine import Pages
from keepset.paged.fp8 import EightBits
from keepset.paged.pages import StridedPages

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

    def take(self, heads: range, index: Int[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        """Return keys and values of entries of some heads, as they are stored.

        Args:
            heads: the heads, counted over layers and rows.
            index: `head * entries + place` of each entry.
        """
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
    """An observation of the first entries of each head. A method that reads `keys` or `values` has all of them copied.

    Args:
        entries: the entries in their pages.
        width: how many of each head's places are observed.
        parts: further arguments of `Observation`.
    """

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

    @property
    def dtype(self) -> torch.dtype:
        return self._entries.pages.dtype

    @property
    def head_dim(self) -> int:
        return self._entries.pages.head_dim

    @property
    def entry_bytes(self) -> int:
        return self._entries.pages.entry_bytes
