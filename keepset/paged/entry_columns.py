"""`EntryColumns`: numbers per entry besides key and value, in the same slots, so that all of them move together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.features.queries import WindowAttention
from keepset.core.method import Method
from keepset.kernels.packed import BIAS
from keepset.paged.eviction import OccupiedPages
from keepset.recipe import Recipe

POSITION = "position"
"""The column of original positions: int32, stored as float32 bits."""
STAYS = "stays"
"""The column that says which entries of a finished turn stay when the next one begins: 1 for those that do."""
_ROOM = 64
"""Entries by which a request's private column grows, at least."""


def columns_of(
    recipe: Recipe, group: int, *, contexts: bool = False, saves: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the name of each column under a recipe, and the shape of an entry's numbers in it.

    Args:
        recipe: what requests are compressed by.
        group: query heads per KV head.
        contexts: whether requests can begin with saved contexts, whose entries may have biases.
        saves: whether requests may be saved, for which positions must be known at their end.
    """
    method: Method = recipe.method
    sums = {feature.column: feature.sums_of.shape(group) for feature in method.traits.needs.of(WindowAttention)}
    single = [BIAS] if method.traits.biased or contexts else []
    # Without a later event neither positions nor remembered numbers are needed.
    if recipe.schedule.every is not None or recipe.schedule.turns:
        single += [POSITION, *method.traits.state_names]
    elif saves:
        single.append(POSITION)
    if recipe.schedule.turns:
        single.append(STAYS)
    return dict.fromkeys(single, ()) | sums


class EntryColumns:
    """Numbers of the entries of some layers, by slot.

    Several requests may share their first pages until each has its first event. The attention that an entry receives
    until then differs between requests, but its slot has one number. So such a request has private columns, which are
    indexed by position.

    Args:
        columns: the name of each column, and the shape of an entry's numbers in it.
        layers, kv_heads, slots: how many layers there are, and KV heads and slots in each.
        block_size: tokens of a block.
        device: device of the cache.
        biased: whether attention adds biases even before any entry has one, because a graph may be captured then.
    """

    def __init__(
        self,
        columns: Mapping[str, tuple[int, ...]],
        layers: int,
        kv_heads: int,
        slots: int,
        block_size: int,
        device: torch.device,
        biased: bool = False,
    ) -> None:
        self._columns = {
            name: torch.zeros(layers, slots, *shape, dtype=torch.float32, device=device)
            for name, shape in columns.items()
        }
        self._private: dict[tuple[int, str], Tensor] = {}
        self._kv_heads, self._block_size, self._biased = kv_heads, block_size, biased and BIAS in columns

    def __getitem__(self, name: str) -> Float[Tensor, "layers slots *rest"]:
        return self._columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    @property
    def bias(self) -> Float[Tensor, "layers slots"] | None:
        """What attention adds to the logits of packed entries; None as long as no entry needs a bias."""
        return self[BIAS] if self._biased else None

    def private(self, request: int, name: str, entries: int) -> Float[Tensor, "layers kv_heads places *rest"]:
        """Return a request's private column, for writing.

        Args:
            request: the request, by its ring slot.
            name: of the column.
            entries: entries of each head that it must have room for.
        """
        column, whole = self._private.get((request, name)), self._columns[name]
        if column is None or column.shape[2] < entries:
            shape = len(whole), self._kv_heads, entries + _ROOM, *whole.shape[2:]
            grown = torch.zeros(shape, dtype=torch.float32, device=whole.device)
            if column is not None:
                grown[:, :, : column.shape[2]] = column
            self._private[request, name] = column = grown
        return column

    def forget(self, request: int) -> None:
        """Drop a request's private columns, once its event is over."""
        for key in [key for key in self._private if key[0] == request]:
            del self._private[key]

    def slots(self, subpages: Int[Tensor, "*rows pages"]) -> Int[Tensor, "*rows entries"]:
        """Return the slots of all entries of these sub-pages, in order."""
        offset = torch.arange(self._block_size, device=subpages.device)
        return (subpages[..., None] * self._block_size + offset).flatten(-2)

    def read(
        self, name: str, slots: Int[Tensor, "layers_rows kv_heads entries"]
    ) -> Float[Tensor, "layers_rows kv_heads entries *rest"]:
        """Return a column's numbers of some entries.

        Args:
            name: of the column.
            slots: the slots of entries, from 0 in the first layer on.
        """
        return self[name].flatten(0, 1)[slots]

    def write(self, name: str, slots: Int[Tensor, " n"], numbers: Float[Tensor, " n"]) -> None:
        """Write number `i` to `slots[i]`.

        Args:
            name: of the column.
            slots: the slots of entries; distinct.
            numbers: the number of each.
        """
        self._biased |= name == BIAS
        self[name].view(-1)[slots] = numbers.to(self[name].dtype)

    def of_blocks(self, blocks: Int[Tensor, " blocks"]) -> dict[str, Float[Tensor, "layers blocks slots *rest"]]:
        """Return the numbers of all slots of some blocks, by the name of the column."""
        return {name: self._in_blocks(name)[:, blocks] for name in self._columns}

    def write_blocks(
        self, blocks: Int[Tensor, " blocks"], columns: Mapping[str, Float[Tensor, "layers blocks slots *rest"]]
    ) -> None:
        """Write the numbers of all slots of some blocks.

        Args:
            blocks: the blocks; distinct.
            columns: the numbers by the name of the column, as `of_blocks` returns them.
        """
        for name, numbers in columns.items():
            self._biased |= name == BIAS
            self._in_blocks(name)[:, blocks] = numbers.to(blocks.device)

    def _in_blocks(self, name: str) -> Float[Tensor, "layers all_blocks slots *rest"]:
        return self[name].unflatten(1, (-1, self._kv_heads * self._block_size))

    def write_no_bias(self, slots: Int[Tensor, " n"]) -> None:
        """Clear the biases that earlier entries have left in some slots."""
        if self._biased:
            self[BIAS].view(-1)[slots] = 0

    def positions(
        self, occupied: OccupiedPages, lengths: Int[Tensor, " layers_rows"]
    ) -> Int[Tensor, "layers_rows kv_heads entries"]:
        """Return the original position of each entry.

        Args:
            occupied: where the entries lie.
            lengths: tokens of each request.
        """
        subpages, packed, entries = occupied
        index = torch.arange(subpages.shape[-1] * self._block_size, device=subpages.device)
        # Nothing was dropped since the last event, so all later entries lie equally far before their positions.
        positions = index + (lengths[:, None] - entries)[..., None]
        if POSITION not in self:
            return positions
        stored = self.read(POSITION, self.slots(subpages)).view(torch.int32).long()
        return stored.where(index < packed[..., None], positions)

    def write_positions(self, slots: Int[Tensor, " n"], positions: Int[Tensor, " n"]) -> None:
        """Write the original positions of entries, if there is a column for them.

        Args:
            slots: the slots of entries; distinct.
            positions: the position of each, counted from its request's first token.
        """
        if POSITION in self:
            self.write(POSITION, slots, positions.int().view(torch.float32))
