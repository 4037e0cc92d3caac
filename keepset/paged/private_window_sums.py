"""`OwnSums`: what is added up of entries whose pages other requests may have, too.

Several requests may begin with the same pages until each has its first event. What an entry has received since is
every request's own then, and the page's slots have one number for all of them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_ROOM = 64
"""Entries by which the room of a request grows, at least."""


class OwnSums:
    """Numbers of requests that nothing was dropped of: an entry's place is its position.

    Args:
        layers, kv_heads: how many of them.
    """

    def __init__(self, layers: int, kv_heads: int) -> None:
        self._layers, self._kv_heads = layers, kv_heads
        self._columns: dict[tuple[int, str], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated: of requests between their window's first query and their event."""
        return sum(column.nbytes for column in self._columns.values())

    def column(
        self, slot: int, name: str, shape: tuple[int, ...], entries: int, device: torch.device
    ) -> Float[Tensor, "layers kv_heads places *rest"]:
        """A request's numbers of this shape, with room for so many entries at least; it is written to."""
        column = self._columns.get((slot, name))
        if column is None or column.shape[2] < entries:
            grown = torch.zeros(self._layers, self._kv_heads, entries + _ROOM, *shape, device=device)
            if column is not None:
                grown[:, :, : column.shape[2]] = column
            self._columns[slot, name] = column = grown
        return column

    def forget(self, slot: int) -> None:
        """The request's event is over."""
        for key in [key for key in self._columns if key[0] == slot]:
            del self._columns[key]
