"""`RecordedFeatures`: the features for which queries between two events are recorded, under every runtime.

Few queries are stored until the event that needs them:

- Attention of a window of queries is added to a column of the entries while the queries come.
- Moments of queries are merged while the queries come, if they take less memory than the queries.
- Only a few queries wait, so that one product serves several, and those that events read directly.

A window reaches no further back than the previous event. So no entry is dropped during a window, and the sums equal
those that its queries would give at the event.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.feature import Needs
from keepset.core.features.moments import QueryMoments
from keepset.core.features.window import WindowAttention
from keepset.recipe import Recipe

SummedFeature = WindowAttention | QueryMoments
"""A feature that is computed while the queries of its window come."""


@dataclass(frozen=True)
class RecordedFeatures:
    """Features that a recipe computes from the queries between two events; the same for all layers.

    Attributes:
        sums: attention that is added to columns of the entries.
        moments: moments that are merged.
        newest: how many of the newest queries an event after the prompt reads directly.
        every: tokens from event to event; None if there is no event after the prompt.
    """

    sums: tuple[WindowAttention, ...]
    moments: tuple[QueryMoments, ...]
    newest: int
    every: int | None

    @classmethod
    def of(cls, needs: Needs, every: int | None) -> RecordedFeatures:
        """Return the features recorded for a method; `every` is None if there is no event after the prompt."""
        moments = [] if every is None else [feature for feature in needs.of(QueryMoments) if feature.buffer]
        return RecordedFeatures(tuple(needs.of(WindowAttention)), tuple(moments), needs.newest, every)

    @property
    def added_up(self) -> tuple[SummedFeature, ...]:
        """Return all features that are computed while queries come."""
        return (*self.sums, *self.moments)

    def window(self, feature: SummedFeature, ends_prompt: bool = False) -> int:
        """Return how many queries before an event a summed feature covers; the event may end the prompt."""
        if ends_prompt:
            return feature.window
        assert self.every is not None
        return min(feature.buffer if isinstance(feature, QueryMoments) else feature.window, self.every)

    def summed(self, ends_prompt: bool = False) -> int:
        """Return the most queries before an event that a summed feature covers."""
        return max([self.window(feature, ends_prompt) for feature in self.added_up], default=0)

    def reach(self, ends_prompt: bool = False) -> int:
        """Return how many of the newest queries before an event are recorded."""
        return max(self.newest, self.summed(ends_prompt))


def moments_nbytes(query_heads: int, head_dim: int) -> int:
    """Return the bytes of the moments of one request's queries: a mean and a covariance's triangle in float32."""
    return 4 * query_heads * (head_dim * (head_dim + 1) // 2 + head_dim)


_MOST = 4
"""The most queries that wait in a slot until one product serves them all."""
_SHARE = 24
"""Waiting queries take at most the bytes of a request's entries divided by this."""


@dataclass(frozen=True)
class Recording(RecordedFeatures):
    """The recorded features of a runtime that allocates a slot for each request beforehand.

    Attributes:
        waiting: the most queries that wait to be summed, apart from drafted ones.
        group: query heads that share a KV head.
        drafts: the largest number of a request's newest tokens that may be rejected after a step. Its accepted tokens
            join the waiting queries together.
    """

    waiting: int
    group: int
    drafts: int = 0

    @classmethod
    def of_recipe(cls, recipe: Recipe, group: int, head_dim: int, itemsize: int, drafts: int = 0) -> Recording:
        """Return the features that a recipe records. Moments larger than their queries are computed at the event.

        Args:
            group: query heads that share a KV head.
            itemsize: bytes of a number.
            drafts: the largest number of a request's newest tokens that may be rejected after a step.
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
        """Return whether any queries are recorded."""
        return bool(self.newest or self.sums or self.moments)

    @property
    def size(self) -> int:
        """The number of queries in a slot."""
        return max(self.newest, self.room if self.sums or self.moments else 0)

    @property
    def room(self) -> int:
        """The number of queries that can wait in a slot."""
        return self.waiting + self.drafts
