"""What entries in pages receive of a few queries: added to a number of each entry, its keys where they lie."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.kernels.blocks import PRODUCT_BLOCK, block_size
from keepset.kernels.window import received_attention


@runtime_checkable
@runtime_checkable
class KeyPages(Protocol):
    """Sub-pages that keys are read from."""

    @property
    def block_size(self) -> int:
        """Entries of a sub-page."""

    def read_keys(self, subpages: Int[Tensor, "*rows pages"]) -> Float[Tensor, "*rows entries head_dim"]:
        """Keys of whole sub-pages, each row's pages joined."""


def add_received_in_pages(
    column: Float[Tensor, " slots"],
    queries: Float[Tensor, "rows query_heads n head_dim"],
    pages: KeyPages,
    subpages: Int[Tensor, "rows kv_heads pages"],
    entries: Int[Tensor, "rows kv_heads"],
    unwritten: Int[Tensor, " rows"],
    visible: Int[Tensor, "rows kv_heads n"],
    scaling: float,
    largest: bool = False,
    bias: Float[Tensor, " slots"] | None = None,
    kept: Int[Tensor, "rows kv_heads"] | None = None,
    places: Int[Tensor, "rows kv_heads entries"] | None = None,
) -> None:
    """Adds what every entry receives of some queries: their attention, the mean over its query group, summed over them.

    Args:
        column: a number for each slot of the cache, `subpage * block_size + offset`; it is written to.
        queries: after rotation.
        pages: the cache.
        subpages: that hold each head's entries, in their order; any number, where a head needs fewer.
        entries: of each head.
        unwritten: of how many of the newest entries of each head the column's number means nothing yet.
        visible: how many of a head's first entries a query sees; none, and it gives nothing.
        scaling: of the logits.
        largest: of the logits of a group the largest counts, as if its heads were one.
        bias: of each slot, added to the logits of a head's first `kept` entries.
        kept: how many these are; all, unless said otherwise.
        places: where the column has the numbers of a head's entries, if not at their slots.
    """
    kv_heads, size = entries.shape[1], pages.block_size
    grouped = queries.unflatten(1, (kv_heads, -1)).flatten(0, 1)
    tables, counts, seen = subpages.flatten(0, 1), entries.flatten(), visible.flatten(0, 1)
    firsts = counts if kept is None else kept.flatten()
    written = counts - unwritten.repeat_interleave(kv_heads, output_size=len(counts))
    place = torch.arange(tables.shape[1] * size, device=column.device)
    at_once = max(1, block_size(column.device, PRODUCT_BLOCK) // (place.shape[0] * queries.shape[-1]))
    for first in range(0, len(counts), at_once):
        part = slice(first, first + at_once)
        keys, there = pages.read_keys(tables[part]), place < counts[part, None]
        positions = place.expand(there.shape)
        slots = (tables[part, :, None] * size + torch.arange(size, device=place.device)).flatten(1)
        biases = None if bias is None else bias[slots].where(place < firsts[part, None], 0)
        last = seen[part] - 1
        sums = received_attention(grouped[part], keys, positions, last, scaling, there, largest, biases).mean(1)
        at = slots if places is None else places.flatten(0, 1)[part]
        sums += column[at].where(place < written[part, None], 0)
        column[at[there]] = sums[there]
