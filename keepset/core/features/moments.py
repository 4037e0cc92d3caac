"""`QueryMoments`, `HiddenMoments`: how a layer's queries before rotation, and its hidden states, are distributed."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.accumulate import Accumulator, Ahead, Chunk, QuerySource
from keepset.core.feature import Feature
from keepset.kernels.moments import Moments

_WHOLE_PROMPT = "looks at moments over the whole prompt, "

Rotate = Callable[[Tensor, int], Tensor]
"""`(rows [batch, query_heads, n, head_dim] before rotation, future) -> rows` at the mean rotation of the
`future` positions that follow the request's last token."""


@dataclass(frozen=True, eq=False)
class QueryDistribution:
    """Mean and covariance of a layer's queries before rotation, and the way to rotate them ahead."""

    mean: Float[Tensor, "batch query_heads head_dim"]
    covariance: Float[Tensor, "batch query_heads head_dim head_dim"]
    rotate: Rotate

    def ahead(
        self, future: int
    ) -> tuple[Float[Tensor, "batch query_heads head_dim"], Float[Tensor, "batch query_heads head_dim head_dim"]]:
        """Both moments under the mean rotation R of the next `future` positions: R m and R C R'."""
        mean = self.rotate(self.mean[:, :, None], future)[:, :, 0]
        half = self.rotate(self.covariance, future)
        return mean, self.rotate(half.transpose(-1, -2), future).transpose(-1, -2)


@dataclass(frozen=True, eq=False)
class HiddenDistribution:
    """Mean and variance of the hidden states that enter a layer's attention, and the way to make queries of others.

    Attributes:
        mean, variance: per channel, of the population.
        queries: `(hidden [batch, n, hidden], future) -> [batch, query_heads, n, head_dim]`: queries that these hidden
            states would make at the mean rotation of the next `future` positions.
    """

    mean: Float[Tensor, "batch hidden"]
    variance: Float[Tensor, "batch hidden"]
    queries: Rotate


@dataclass(frozen=True)
class QueryMoments(Feature[QueryDistribution]):
    """Mean and covariance of each query head's queries before rotation.

    Attributes:
        skip: how many of the first tokens to leave out.
        buffer: over how many of the newest queries they are taken at an event after the prompt; at the prompt's end
            it is the whole prompt. 0: they do not exist at later events. Moments of another buffer are the same thing.
    """

    label = "query moments"
    unrotated = True

    skip: int
    buffer: int = field(default=0, compare=False)

    @property
    def prompt_only(self) -> str:
        """Where nothing says of how many queries they are taken later."""
        missing = "QueryMoments(buffer=...) does not say over how many of the newest queries to take them later"
        return "" if self.buffer else f"{_WHOLE_PROMPT}and {missing}"

    def merged(self, other: QueryMoments) -> QueryMoments:
        """The longer buffer."""
        return max(self, other, key=lambda feature: feature.buffer)

    @classmethod
    def accumulator(cls, features: Sequence[QueryMoments]) -> Accumulator:
        """Rotation is undone once."""
        return _OfQueries(features)


@dataclass(frozen=True)
class HiddenMoments(Feature[HiddenDistribution]):
    """Mean and variance of the hidden states that enter the layer's attention.

    Attributes:
        skip: how many of the first tokens to leave out.
    """

    label = "hidden-state moments"
    unrotated = True
    hidden_states = True
    prompt_only = f"{_WHOLE_PROMPT}and only there"

    skip: int

    @classmethod
    def accumulator(cls, features: Sequence[HiddenMoments]) -> Accumulator:
        """Of whatever is skipped."""
        return _OfHidden(features)


class _Moments(Accumulator):
    full: ClassVar[bool]

    def __init__(self, features: Sequence[Any]) -> None:
        self._moments = {feature: Moments() for feature in features}
        self._source: QuerySource

    @abstractmethod
    def rows(self, chunk: Chunk, source: QuerySource) -> Float[Tensor, "batch heads n dim"]:
        """What they are moments of."""

    def add(self, chunk: Chunk) -> None:
        assert chunk.source is not None
        self._source, rows = chunk.source, self.rows(chunk, chunk.source)
        self._moments = {feature: copy.copy(moments) for feature, moments in self._moments.items()}
        for feature, moments in self._moments.items():
            moments.add(rows, chunk.counted(feature.skip), self.full)

    def joined(self, others: Sequence[_Moments]) -> Any:
        twin = copy.copy(self)
        twin._moments = {
            feature: moments.joined([other._moments[feature] for other in others])
            for feature, moments in self._moments.items()
        }
        return twin


class _OfQueries(_Moments):
    full = True

    def rows(self, chunk: Chunk, source: QuerySource) -> Float[Tensor, "batch heads n dim"]:
        return source.undo(chunk.queries, chunk.positions)

    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[Feature[Any], Any]:
        rotate = Ahead(self._source, lengths)
        return {
            feature: QueryDistribution(moments.mean, moments.covariance, rotate)
            for feature, moments in self._moments.items()
        }


class _OfHidden(_Moments):
    full = False

    def rows(self, chunk: Chunk, source: QuerySource) -> Float[Tensor, "batch heads n dim"]:
        return source.hidden[:, None, : chunk.queries.shape[2]].float()

    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[Feature[Any], Any]:
        source = self._source

        def queries(hidden: Tensor, future: int) -> Tensor:
            return source.queries(hidden, lengths, future)

        return {
            feature: HiddenDistribution(moments.mean[:, 0], moments.covariance[:, 0], queries)
            for feature, moments in self._moments.items()
        }
