"""`EvictionEvent`: the compression of some requests in the layers of a group; and which requests are batched in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

from jaxtyping import Int
from torch import Tensor

from keepset.core.keep_set import LayerKeepSet
from keepset.paged.event_pages import EventPages
from keepset.paged.query_records import QueryRecord
from keepset.recipe import Recipe

Request = TypeVar("Request")

MAX_ENTRIES = 1 << 20
"""Entries of all heads that an event looks at together, if there is more than one request in one layer."""
_MAX_HEAD_ENTRIES = 1 << 17
"""Entries of one head that it looks at together."""


@dataclass(frozen=True)
class EvictionEvent:
    """The compression of some requests by one recipe. Where heads are equal, all requests hold equally many entries.

    The event's point is a number of tokens. Entries that came after it in the same step (a prompt that is computed
    again after a preemption ends anywhere) are not looked at and stay.

    Attributes:
        recipe: the recipe of these requests.
        rows: the requests, by their rows of the batch.
        at: the event's point of each request.
        earliest, latest: the least and the greatest of these points.
        prompts: tokens of each request's prompt.
        newer: entries after the point.
        keep: entries that the average head of each request must be left with; None where the data decide.
        compressed: whether these requests were compressed before.
        ends_prompt: whether the point is the prompt's end.
        equal_heads: whether all heads have equally many entries.
        pages: where the entries lie before the event, and after it.
        records: what is recorded of the requests, where the recipe looks at queries or whole prompts; else empty.
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
    """Return how many layers an event looks at together.

    Args:
        recipe: the recipe of the event.
        entries: entries per head of all requests in one layer.
        kv_heads: KV heads of a layer.
    """
    numbers = entries * recipe.method.traits.memory_factor
    return max(1, min(_MAX_HEAD_ENTRIES // numbers, MAX_ENTRIES // (numbers * kv_heads)))


def batches_of_similar_length(
    recipe: Recipe, requests: Sequence[Request], entries: Sequence[int], kv_heads: int
) -> Iterator[list[Request]]:
    """Yield requests that are compressed together, the longest first.

    All of a batch are looked at as if they were as long as the longest, so none joins one of more than twice its
    entries.

    Args:
        recipe: the recipe of the requests.
        requests: the requests.
        entries: entries per head of each request.
        kv_heads: KV heads of a layer.
    """
    waiting = sorted(zip(entries, requests, strict=True), key=lambda one: -one[0])
    while waiting:
        longest = waiting[0][0]
        most = max_layers_per_event(recipe, longest, kv_heads)
        batch = [request for held, request in waiting[:most] if 2 * held >= longest]
        yield batch
        del waiting[: len(batch)]
