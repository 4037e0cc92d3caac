"""`EvictionEvent`: the compression of some requests in a group's layers, its pages, and the batches of requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple, TypeVar

from jaxtyping import Int
from torch import Tensor

from keepset.core.keep_set import LayerKeepSet, LazyHostInts
from keepset.paged.query_records import QueryRecord
from keepset.recipe import Recipe


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
    """Pages for the entries that stay of an event's requests in some layers.

    Attributes:
        fits: 1 for each row of each layer whose entries fit its blocks; 0 if they do not, and the row is not changed.
            None if all rows fit.
        take: assigns the pages. Its argument is the number of entries of the largest head; it returns as many
            sub-pages per head as that one needs.
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
        """Return pages for the entries that stay in these layers.

        Args:
            places: the layers, by their places in the group.
            counts: how many entries of each head stay, layer after layer and row after row.
        """


Request = TypeVar("Request")

MAX_ENTRIES = 1 << 20
"""The most entries of all heads that an event reads together, unless they are of one request in one layer."""
_MAX_HEAD_ENTRIES = 1 << 17
"""The most entries of one head that an event reads together."""


@dataclass(frozen=True)
class EvictionEvent:
    """The compression of some requests by one recipe. Where heads are equal, all requests hold equally many entries.

    The event's point is a number of tokens. Entries that came after it in the same step are not read and stay. (A
    prompt that is computed again after a preemption may end anywhere in a step.)

    Attributes:
        recipe: the recipe of these requests.
        rows: the requests, by their rows of the batch.
        at: the event's point of each request.
        earliest, latest: the least and the greatest of these points.
        prompts: tokens of each request's prompt.
        newer: entries after the point.
        keep: entries that the average head of each request keeps; None if the data decide.
        compressed: whether these requests were compressed before.
        ends_prompt: whether the point is the prompt's end.
        equal_heads: whether all heads have equally many entries.
        pages: where the entries lie before the event, and after it.
        records: the records of the requests, if the recipe looks at queries or whole prompts; else empty.
        slots: the slots of these records.
    """

    recipe: Recipe
    rows: Sequence[int]
    at: Int[Tensor, " rows"]
    earliest: int
    latest: int
    prompts: Int[Tensor, " rows"]
    newer: int
    keep: Sequence[int] | None
    compressed: bool
    ends_prompt: bool
    equal_heads: bool
    pages: EventPages
    records: Sequence[QueryRecord]
    slots: Int[Tensor, " recorded"]

    def is_counted(self, kept: LayerKeepSet) -> bool:
        """Return whether a layer keeps as many entries as the scheduler counts with."""
        if self.keep is None:
            return True
        sizes, heads = kept.heads.host_values, kept.counts.shape[1]
        sizes_by_row = [sizes[first : first + heads] for first in range(0, len(sizes), heads)]
        rows = zip(sizes_by_row, cycle(self.keep), strict=False)  # layer after layer
        if self.equal_heads:
            return all(set(own) == {keep} for own, keep in rows)
        return all(sum(own) <= keep * heads for own, keep in rows)


def max_layers_per_event(recipe: Recipe, entries: int, kv_heads: int) -> int:
    """Return how many layers an event may read together: at least one, and more if they have few entries.

    Given the entries of one request in one layer, it is the number of such requests that may be read together.

    Args:
        recipe: the recipe.
        entries: entries of each head of a layer, of all requests together.
        kv_heads: KV heads of a layer.
    """
    numbers = entries * recipe.method.traits.memory_factor
    return max(1, min(_MAX_HEAD_ENTRIES // numbers, MAX_ENTRIES // (numbers * kv_heads)))


def batches_of_similar_length(
    recipe: Recipe, requests: Sequence[Request], entries: Sequence[int], kv_heads: int
) -> Iterator[list[Request]]:
    """Yield the requests in batches that are compressed together, the longest first.

    In a batch every request is padded to the longest one. So a batch has no request with less than half of the longest
    one's entries.

    Args:
        recipe: their recipe.
        requests: the requests.
        entries: entries of each head of each request.
        kv_heads: KV heads of a layer.
    """
    waiting = sorted(zip(entries, requests, strict=True), key=lambda one: -one[0])
    while waiting:
        longest = waiting[0][0]
        most = max_layers_per_event(recipe, longest, kv_heads)
        batch = [request for held, request in waiting[:most] if 2 * held >= longest]
        yield batch
        del waiting[: len(batch)]
