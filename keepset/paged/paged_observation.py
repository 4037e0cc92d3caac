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
from keepset.paged.pages import StridedPages, read_layers

AT_ONCE = 1 << 26
"""Bytes of entries that are taken out of pages at a time, if not of one head: 64 MiB."""


class PagedEntries:
    """The entries of the same sub-pages of several layers, layer after layer and row after row.

    Args:
        pages: of the layers.
        subpages: that hold each head's entries, in their order.

    Attributes:
        pages: as given.
        shape: layers and rows together, KV heads, and entries of each, with what lies behind them in their last page.
    """

    def __init__(self, pages: Sequence[Pages], subpages: Int[Tensor, "rows kv_heads pages"]) -> None:
        self.pages, self._subpages = pages, subpages
        rows, kv_heads, number = subpages.shape
        self.shape = torch.Size((len(pages) * rows, kv_heads, number * pages[0].block_size))
        self._eight_bits = [layer.eight_bits for layer in pages if layer.eight_bits is not None]
        self._few = self.shape.numel() * pages[0].entry_bytes <= AT_ONCE

    def keys(self, heads: slice) -> Float[Tensor, "layers_rows heads entries head_dim"]:
        """Keys of some KV heads; where they are few all are read, once."""
        if self._few:
            return self._read(self._all[0][:, heads], [one.keys for one in self._eight_bits])
        return torch.cat([layer.read_keys(self._subpages[:, heads]) for layer in self.pages])

    def values(self, heads: slice) -> Float[Tensor, "layers_rows heads entries head_dim"]:
        """Values likewise."""
        stored = self._all[1][:, heads] if self._few else read_layers(self.pages, self._subpages[:, heads])[1]
        return self._read(stored, [one.values for one in self._eight_bits])

    def _read(self, stored: Tensor, scales: Sequence[Tensor]) -> Tensor:
        """Keys or values in their own type; each layer has its scale."""
        if not scales:
            return stored
        of_rows = torch.stack(list(scales)).repeat_interleave(len(self._subpages))
        return self._eight_bits[0].read(stored, of_rows[:, None, None, None])

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        return read_layers(self.pages, self._subpages)

    def take(self, heads: range, index: Int[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        """Key and value of entries of some heads, as they lie in the cache.

        Args:
            heads: counted over layers and rows.
            index: of each entry, `head * entries + place`.
        """
        first = self.pages[0]
        if isinstance(first, StridedPages):
            of_layer = self.shape.numel() // len(self.pages)
            return first.take(index // of_layer, self._slots(index % of_layer))
        if self._few or len(self.pages) > 1:
            keys, values = (part.flatten(0, 2) for part in self._all)
        else:
            own = self._subpages.flatten(0, 1)[heads.start : heads.stop]
            keys, values = (part.flatten(0, 1) for part in first.read(own))
            index = index - heads.start * self.shape[2]
        return keys.index_select(0, index), values.index_select(0, index)

    def _slots(self, within: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Where entries of a layer lie in its cache."""
        size = self.pages[0].block_size
        return self._subpages.flatten().index_select(0, within // size) * size + within % size


class PagedObservation(Observation):
    """An observation of the first `width` entries of each head.

    Whoever looks at all keys or values at once has them all taken out of their pages.
    """

    _entries: PagedEntries

    def __init__(self, entries: PagedEntries, width: int, **parts: Any) -> None:
        pages = entries.pages[0]
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
    def head_dim(self) -> int:
        return self._entries.pages[0].head_dim

    @property
    def entry_bytes(self) -> int:
        return self._entries.pages[0].entry_bytes
