"""`EntryColumns`: numbers of entries beside key and value, indexed by the same slots: all of it moves together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.features.window import WindowAttention
from keepset.core.method import Method
from keepset.core.observation import BIAS
from keepset.paged.event_pages import OccupiedPages
from keepset.recipe import Recipe

POSITION = "position"
"""Whole numbers, bit for bit."""

COLUMN_BYTES = 4
"""Of one number."""


def columns_of(recipe: Recipe, group: int, saves: bool = False) -> dict[str, tuple[int, ...]]:
    """The numbers that an entry has under a recipe: their names, and the shape of each.

    Args:
        recipe: that is executed.
        group: query heads to a KV head.
        saves: whether it is asked at the end where entries come from.
    """
    method: Method = recipe.method
    sums = {feature.column: feature.sums_of.shape(group) for feature in method.traits.needs.of(WindowAttention)}
    # Without a later event nobody asks where an entry came from: but attention does for its bias.
    biases = (BIAS,) if method.traits.biased else ()
    single = (*biases, *([POSITION] if saves else []))
    return dict.fromkeys(single if recipe.schedule.every is None else (POSITION, *method.traits.state_names), ()) | sums


class EntryColumns:
    """Those of some layers.

    Args:
        columns: their names, and the shape of an entry's numbers in each.
        layers, slots: how many of them there are.
        block_size: tokens per page.
        device: of the cache.
    """

    def __init__(
        self, columns: Mapping[str, tuple[int, ...]], layers: int, slots: int, block_size: int, device: torch.device
    ) -> None:
        self._columns = {name: torch.zeros(layers, slots, *shape, device=device) for name, shape in columns.items()}
        self._block_size = block_size

    def __getitem__(self, name: str) -> Float[Tensor, "layers slots *rest"]:
        return self._columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    @property
    def bias(self) -> Float[Tensor, "layers slots"] | None:
        """What attention adds to the logits of entries that an event has packed; None: nothing."""
        return self._columns.get(BIAS)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(column.nbytes for column in self._columns.values())

    def slots(self, subpages: Int[Tensor, "*rows pages"]) -> Int[Tensor, "*rows entries"]:
        """Of all entries of these sub-pages, in their order."""
        offset = torch.arange(self._block_size, device=subpages.device)
        return (subpages[..., None] * self._block_size + offset).flatten(-2)

    def read(
        self, name: str, slots: Int[Tensor, "layers_rows kv_heads entries"]
    ) -> Float[Tensor, "layers_rows kv_heads entries *rest"]:
        """A column's numbers of these slots, which are numbered through all layers."""
        return self[name].flatten(0, 1)[slots]

    def write(self, name: str, slots: Int[Tensor, " n"], numbers: Float[Tensor, " n"]) -> None:
        """Puts number `i` at `slots[i]`, likewise."""
        self[name].view(-1)[slots] = numbers.to(self[name].dtype)

    def positions(
        self, occupied: OccupiedPages, lengths: Int[Tensor, " layers_rows"]
    ) -> Int[Tensor, "layers_rows kv_heads entries"]:
        """Original positions of entries, where the requests have so many tokens."""
        subpages, packed, entries = occupied
        index = torch.arange(subpages.shape[-1] * self._block_size, device=subpages.device)
        # Entries that came after the event before are whole: each lies as far behind its position as were dropped.
        positions = index + (lengths[:, None] - entries)[..., None]
        if POSITION not in self:
            return positions
        stored = self.read(POSITION, self.slots(subpages)).view(torch.int32).long()
        return stored.where(index < packed[..., None], positions)

    def write_positions(self, slots: Int[Tensor, " n"], positions: Int[Tensor, " n"]) -> None:
        """Notes where entries come from, if that is ever asked."""
        if POSITION in self:
            self.write(POSITION, slots, positions.int().view(torch.float32))
