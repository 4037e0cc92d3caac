"""The pages of an event's requests: where their entries lie before it, and where what stays will lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor

from keepset.core.keep_set import LazyHostInts


class OccupiedPages(NamedTuple):
    """The pages of requests' entries in some layers, layer after layer and request after request.

    Attributes:
        subpages: the sub-pages of each head, in the order of its entries; numbered through all layers of the group.
        packed: how many entries of each head the event before has packed; they come first (see `EntriesInPages`).
        entries: the number of entries of each head.
    """

    subpages: Int[Tensor, "layers_rows kv_heads pages"]
    packed: Int[Tensor, "layers_rows kv_heads"]
    entries: Int[Tensor, "layers_rows kv_heads"]


@dataclass(frozen=True)
class PageAssignment:
    """Pages for what stays of an event's requests in some layers.

    Attributes:
        fits: 1 for each row of each layer whose entries fit its blocks; 0 where they do not, and the row stays as it
            is. None if all rows fit.
        take: assigns the pages. It takes the entries of the largest head, and returns as many sub-pages per head as
            that one needs.
    """

    fits: LazyHostInts | None
    take: Callable[[int], Int[Tensor, "layers_rows kv_heads pages"]]

    @property
    def host_reads(self) -> list[LazyHostInts]:
        """The integers that the host must read before it calls `take`."""
        return [] if self.fits is None else [self.fits]


class EventPages(ABC):
    """The pages of an event's requests in the layers of a group. `places` are layers, by their places in the group."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of entries of the largest head."""

    @abstractmethod
    def held(self, places: range) -> Sequence[int]:
        """Return the number of entries of each request in each layer, layer after layer."""

    @abstractmethod
    def occupied(self, places: range) -> OccupiedPages:
        """Return where the entries lie in these layers."""

    @abstractmethod
    def assign(self, places: range, counts: Int[Tensor, "layers_rows kv_heads"]) -> PageAssignment:
        """Return pages for what stays in these layers.

        Args:
            places: the layers.
            counts: entries of each head that stay, those behind the event's point included.
        """
