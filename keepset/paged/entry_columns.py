"""`EntryColumns`: numbers of entries beside key and value, indexed by the same slots: all of it moves together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.features.window import WindowAttention
from keepset.core.method import Method
from keepset.paged.page_tables import OccupiedPages
from keepset.recipe import Recipe

_POSITION = "position"


def columns_of(recipe: Recipe) -> tuple[str, ...]:
    """Names of the numbers that an entry has under a recipe: 4 bytes each."""
    method: Method = recipe.method
    sums = tuple(feature.column for feature in method.needs.of(WindowAttention))
    # Without a later event nobody asks where an entry came from.
    return sums if recipe.schedule.every is None else (_POSITION, *method.remembers, *sums)


class EntryColumns:
    """One layer's.

    Args:
        names: of the columns.
        numbers: room for them.
        block_size: tokens per page.
    """

    def __init__(self, names: Sequence[str], numbers: Float[Tensor, "columns slots"], block_size: int) -> None:
        self._columns = dict(zip(names, numbers, strict=True))
        self._block_size = block_size

    def __getitem__(self, name: str) -> Float[Tensor, " slots"]:
        return self._columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def slots(self, subpages: Int[Tensor, "*rows pages"]) -> Int[Tensor, "*rows entries"]:
        """Of all entries of these sub-pages, in their order."""
        return (
            subpages[..., None] * self._block_size + torch.arange(self._block_size, device=subpages.device)
        ).flatten(-2)

    def positions(self, occupied: OccupiedPages, lengths: Int[Tensor, " rows"]) -> Int[Tensor, "rows kv_heads places"]:
        """Original positions of entries, where the requests have so many tokens."""
        subpages, kept, entries = occupied
        place = torch.arange(subpages.shape[-1] * self._block_size, device=subpages.device)
        # Entries that came after the event before are whole: each lies as far behind its position as were dropped.
        positions = place + (lengths[:, None] - entries)[..., None]
        if _POSITION not in self:
            return positions
        stored = self[_POSITION].view(torch.int32)[self.slots(subpages)].long()
        return stored.where(place < kept[..., None], positions)

    def write_positions(self, slots: Int[Tensor, " n"], positions: Int[Tensor, " n"]) -> None:
        """Notes where entries come from, if that is ever asked."""
        if _POSITION in self:
            self[_POSITION].view(torch.int32)[slots] = positions.int()
