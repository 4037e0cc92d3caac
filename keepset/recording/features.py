"""`RecordedFeatures`: what the queries between two events are recorded for, under every runtime.

Hardly any query is kept until the event that looks at it:

- Attention of a window of queries is added to a column of the entries while the queries come.
- Moments of queries are merged while the queries come, once they weigh less than the queries.
- Only a few queries wait, so that one product serves several, and those that events read directly.

A window reaches no further back than the event before. So nothing is dropped while a window passes, and the sums are
those that its queries would give at the event.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.feature import Needs
from keepset.core.features.moments import QueryMoments
from keepset.core.features.window import WindowAttention
from keepset.recipe import Recipe

SummedFeature = WindowAttention | QueryMoments
"""A feature that is made while the queries of its window come."""


@dataclass(frozen=True)
class RecordedFeatures:
    """Features that a recipe makes of the queries between two events; the same for all layers.

    Attributes:
        sums: attention that is added to columns of the entries.
        moments: moments that are merged.
        newest: how many of the newest queries an event after the prompt looks at itself.
        every: tokens from event to event; None if there is no event after the prompt.
    """

    sums: tuple[WindowAttention, ...]
    moments: tuple[QueryMoments, ...]
    newest: int
    every: int | None

    @classmethod
    def of(cls, needs: Needs, every: int | None) -> RecordedFeatures:
        """Return what is recorded for a method; `every` is None if there is no event after the prompt."""
        moments = [] if every is None else [feature for feature in needs.of(QueryMoments) if feature.buffer]
        return RecordedFeatures(tuple(needs.of(WindowAttention)), tuple(moments), needs.newest, every)

    @property
    def added_up(self) -> tuple[SummedFeature, ...]:
        """Return all features that are made while queries come."""
        return (*self.sums, *self.moments)

    def window(self, feature: SummedFeature, ends_prompt: bool = False) -> int:
        """Return of how many queries before an event a summed feature is made; the event may end the prompt."""
        if ends_prompt:
            return feature.window
        assert self.every is not None
        return min(feature.window or feature.buffer, self.every)

    def summed(self, ends_prompt: bool = False) -> int:
        """Return how many queries before an event some feature is made of."""
        return max([self.window(feature, ends_prompt) for feature in self.added_up], default=0)

    def reach(self, ends_prompt: bool = False) -> int:
        """Return how many of the newest queries before an event are recorded."""
        return max(self.newest, self.summed(ends_prompt))


def moments_nbytes(query_heads: int, head_dim: int) -> int:
    """Return the bytes of the moments of one request's queries: a mean and a covariance's triangle in float32."""
    return 4 * query_heads * (head_dim * (head_dim + 1) // 2 + head_dim)


_MOST = 4
"""Queries that wait in a slot, at most: one product then serves them all."""
_SHARE = 24
"""Waiting queries take at most one part in so many of the bytes of a request's entries."""


@dataclass(frozen=True)
class Recording(RecordedFeatures):
    """The recorded features of a runtime that allocates all memory before any request comes: a slot for each.

    Attributes:
        waiting: queries that wait to be added up, at most, unless they were drafted.
        group: query heads that share a KV head.
        drafts: how many of a request's newest tokens may be taken back after a step, at most. The others of such a step
            come to the queries that wait together.
    """

    waiting: int
    group: int
    drafts: int = 0

    @classmethod
    def of_recipe(cls, recipe: Recipe, group: int, head_dim: int, itemsize: int, drafts: int = 0) -> Recording:
        """Return what a recipe records. Moments that would weigh more than their queries are made at the event.

        Args:
            recipe: the recipe that is executed.
            group: query heads that share a KV head.
            itemsize: bytes of a number.
            drafts: how many of a request's newest tokens may be taken back after a step, at most.
        """
        every, keep = recipe.schedule.every, recipe.budget.keep
        needed = RecordedFeatures.of(recipe.method.traits.needs, every)
        waiting = _MOST
        if every is not None and isinstance(keep, int):  # an entry is a key and a value
            waiting = max(1, min(_MOST, 2 * (keep + every) // (_SHARE * group)))
        heavy = max(moments_nbytes(1, head_dim) // (head_dim * itemsize), waiting)
        moments = tuple(feature for feature in needed.moments if needed.window(feature) > heavy)
        held = [needed.window(feature) for feature in needed.moments if feature not in moments]
        drafts = 0 if every is None else drafts
        return cls(needed.sums, moments, max([needed.newest, *held]), every, waiting, group, drafts)

    def __bool__(self) -> bool:
        """Return whether queries are looked at at all."""
        return bool(self.newest or self.sums or self.moments)

    @property
    def size(self) -> int:
        """The number of queries in a slot."""
        return max(self.newest, self.room if self.sums or self.moments else 0)

    @property
    def room(self) -> int:
        """The number of queries that can wait in a slot."""
        return self.waiting + self.drafts
