"""`RecentQueries`: the newest queries of a request."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from keepset.core.feature import Feature


@dataclass(frozen=True)
class RecentQueries(Feature[Tensor]):
    """The newest `window` queries, after rotation: `observation.queries`, `window_attention` and `window_usage`.

    They are there at every event; every runtime records them itself.
    """

    window: int = field()

    @property
    def name(self) -> str:
        return f"window of {self.window} queries"

    @property
    def key(self) -> Hashable:
        """A longer window has a shorter one in it."""
        return RecentQueries

    def merged(self, other: RecentQueries) -> RecentQueries:
        return max(self, other, key=lambda feature: feature.window)
