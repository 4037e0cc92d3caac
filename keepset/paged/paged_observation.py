"""An event's entries, which stay in their pages until somebody looks at them or moves them."""

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
"""Bytes of entries that are taken out of pages at a time, if not of one head: 64 MiB."""


class PagedEntries:
    """The entries of some sub-pages of several layers, layer after layer and row after row.

    Args:
        pages: of the first layer of the group, through which sub-pages are numbered.
        subpages: that hold each head's entries, in their order.
        scales: of each layer, where numbers have 8 bits.

    Attributes:
        pages: as given.
        shape: layers and rows together, KV heads, and entries of each, with what lies behind them in their last page.
    """

    def __init__(
        self, pages: Pages, subpages: Int[Tensor, "layers_rows kv_heads pages"], scales: Sequence[EightBits] = ()
    ) -> None:
        self.pages, self._subpages, self._scales = pages, subpages, scales
        rows, kv_heads, number = subpages.shape
        self.shape = torch.Size((rows, kv_heads, number * pages.block_size))
        self._few = self.shape.numel() * pages.entry_bytes <= WORKSPACE

    def keys(self, heads: slice) -> Float[Tensor, "layers_rows heads entries head_dim"]:
        """Keys of some KV heads; where they are few all are read, once."""
        if self._few or self._scales:
            return self._meant(self._stored(heads)[0], [one.keys for one in self._scales])
        return self.pages.read_keys(self._subpages[:, heads])

    def values(self, heads: slice) -> Float[Tensor, "layers_rows heads entries head_dim"]:
        """Values likewise."""
        return self._meant(self._stored(heads)[1], [one.values for one in self._scales])

    def _stored(self, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys and values as they lie there."""
        if not self._few:
            return self.pages.read(self._subpages[:, heads])
        keys, values = self._all
        return keys[:, heads], values[:, heads]

    def _meant(self, stored: Tensor, scales: Sequence[Tensor]) -> Tensor:
        """Keys or values in their own type; each layer has its scale."""
        if not scales:
            return stored
        of_rows = torch.stack(list(scales)).repeat_interleave(len(stored) // len(scales))
        return self._scales[0].read(stored, of_rows[:, None, None, None])

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        return self.pages.read(self._subpages)

    def take(self, heads: range, index: Int[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        """Key and value of entries of some heads, as they lie in the cache.

        Args:
            heads: counted over layers and rows.
            index: of each entry, `head * entries + place`.
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
    """An observation of the first `width` entries of each head.

    Whoever looks at all keys or values at once has them all taken out of their pages.
    """

    _entries: PagedEntries

    def __init__(self, entries: PagedEntries, width: int, **parts: Any) -> None:
        pages = entries.pages
        # Of the right shape, and nowhere in memory.
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
