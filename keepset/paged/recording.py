"""`Recording`: what a recipe needs of queries that pass before an event, and how much of it layers hold."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.features.moments import QueryMoments
from keepset.core.features.window import WindowAttention
from keepset.recipe import Recipe

_MOST = 4
"""Queries that wait to be added up, at most: then one product serves them all."""
_SHARE = 24
"""They weigh at most one part in so many of the request's entries."""


@dataclass(frozen=True)
class Recording:
    """The same for all layers of a model.

    Attributes:
        sums: what is added up per entry while queries pass.
        moments: what is made of queries that need not be held, because it weighs less than they do.
        newest: queries that events look at themselves.
        waiting: queries that wait to be added up, at most.
        group: query heads to a KV head.
    """

    sums: tuple[WindowAttention, ...]
    moments: tuple[QueryMoments, ...]
    newest: int
    waiting: int
    group: int
    _every: int | None

    @classmethod
    def of(cls, recipe: Recipe, group: int, head_dim: int, itemsize: int) -> Recording:
        """A recipe's.

        Args:
            recipe: that is executed.
            group: query heads to a KV head.
            head_dim, itemsize: numbers of a query, and bytes of a number.
        """
        needs, every, keep = recipe.method.traits.needs, recipe.schedule.every, recipe.budget.keep
        waiting = _MOST
        if every is not None and isinstance(keep, int):  # an entry is a key and a value
            waiting = max(1, min(_MOST, 2 * (keep + every) // (_SHARE * group)))
        # A symmetric matrix and a mean in float32, in queries of one head.
        weight = 4 * (head_dim * (head_dim + 1) // 2 + head_dim) // (head_dim * itemsize)
        moments = [feature for feature in needs.of(QueryMoments) if feature.buffer and every is not None]
        streamed = tuple(feature for feature in moments if min(feature.buffer, every or 0) > max(weight, waiting))
        held = [min(feature.buffer, every or 0) for feature in moments if feature not in streamed]
        sums = tuple(needs.of(WindowAttention))
        return cls(sums, streamed, max([needs.newest, *held]), waiting, group, every)

    def __bool__(self) -> bool:
        """Whether queries are looked at at all."""
        return bool(self.newest or self.sums or self.moments)

    @property
    def size(self) -> int:
        """Queries of a request that are held."""
        return max(self.newest, self.waiting if self.sums or self.moments else 0)

    def window(self, feature: WindowAttention | QueryMoments, ends_prompt: bool) -> int:
        """Of how many queries before an event it is made."""
        if ends_prompt:
            return feature.window
        assert self._every is not None
        return min(feature.window or feature.buffer, self._every)

    def summed(self, ends_prompt: bool) -> int:
        """How many queries before an event are added up."""
        added: tuple[WindowAttention | QueryMoments, ...] = (*self.sums, *self.moments)
        return max([self.window(feature, ends_prompt) for feature in added], default=0)
