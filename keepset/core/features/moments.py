"""`QueryMoments`, `HiddenMoments`: how a layer's queries before rotation, and its hidden states, are distributed."""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.feature import Accumulator, Chunk, Feature, QuerySource, Value
from keepset.kernels.columns import Moments

_WHOLE_PROMPT = "looks at moments over the whole prompt, "

Rotate = Callable[[Tensor, int], Tensor]
"""`(rows [batch, query_heads, n, head_dim] before rotation, future) -> rows` at the mean rotation of the
`future` positions that follow the request's last token.
"""


@dataclass(frozen=True, eq=False)
class QueryDistribution:
    """Mean and covariance of a layer's queries before rotation.

    Attributes:
        mean, covariance: of each query head.
        rotate: rotates rows to future positions.
    """

    mean: Float[Tensor, "batch query_heads head_dim"]
    covariance: Float[Tensor, "batch query_heads head_dim head_dim"]
    rotate: Rotate

    def ahead(
        self, future: int
    ) -> tuple[Float[Tensor, "batch query_heads head_dim"], Float[Tensor, "batch query_heads head_dim head_dim"]]:
        """Return both moments under the mean rotation R of the next `future` positions: R m and R C R'."""
        mean = self.rotate(self.mean[:, :, None], future)[:, :, 0]
        half = self.rotate(self.covariance, future)
        return mean, self.rotate(half.transpose(-1, -2), future).transpose(-1, -2)


@dataclass(frozen=True, eq=False)
class HiddenDistribution:
    """Mean and variance of the hidden states that enter a layer's attention.

    Attributes:
        mean, variance: per channel, of the population.
        queries: `(hidden [batch, n, hidden], future) -> [batch, query_heads, n, head_dim]`: the queries of other hidden
            states, at the mean rotation of the next `future` positions.
    """

    mean: Float[Tensor, "batch hidden"]
    variance: Float[Tensor, "batch hidden"]
    queries: Rotate


class _Moments(Accumulator):
    def __init__(self, features: Sequence[_OfRows[Any]]) -> None:
        self._moments = {feature: Moments() for feature in features}
        self._source: QuerySource

    def add(self, chunk: Chunk) -> None:
        assert chunk.source is not None
        self._source, kind = chunk.source, next(iter(self._moments))
        rows = kind.rows(chunk)
        self._moments = {feature: copy.copy(moments) for feature, moments in self._moments.items()}
        for feature, moments in self._moments.items():
            moments.add(rows, chunk.counted(feature.skip), kind.full)

    def merged_with(self, following: Sequence[_Moments]) -> _Moments:
        copied = copy.copy(self)
        copied._source = self._source.merged_with([other._source for other in following])
        copied._moments = {
            feature: moments.merged_with([other._moments[feature] for other in following])
            for feature, moments in self._moments.items()
        }
        return copied

    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[Feature[Any], Any]:
        source = self._source
        return {feature: feature.distribution(moments, source, lengths) for feature, moments in self._moments.items()}


class _OfRows(Feature[Value]):
    """Moments of one row per token.

    Attributes:
        full: whether the covariance is a matrix or only its diagonal.
        skip: how many of the first tokens to leave out.
    """

    unrotated = True
    accumulator = _Moments
    full = False

    skip: int

    @abstractmethod
    def rows(self, chunk: Chunk) -> Float[Tensor, "batch heads n dim"]:
        """Return the rows of a chunk."""

    def add(self, moments: Moments, chunk: Chunk) -> None:
        """Add a chunk's rows to moments.

        Args:
            moments: of the rows so far; written to.
            chunk: the next tokens.
        """
        moments.add(self.rows(chunk), chunk.counted(self.skip), self.full)

    @abstractmethod
    def distribution(self, moments: Moments, source: QuerySource, lengths: Int[Tensor, " batch"]) -> Value:
        """Return the feature's value from the moments of its rows, for requests of these lengths in tokens.

        Args:
            moments: of all rows.
            source: tells how queries are rotated.
            lengths: tokens of each request.
        """


@dataclass(frozen=True)
class QueryMoments(_OfRows[QueryDistribution]):
    """Mean and covariance of each query head's queries before rotation.

    Attributes:
        skip: how many of the first tokens to leave out.
        buffer: over how many of the newest queries they are taken at an event after the prompt, at most those since the
            event before. At the prompt's end they are taken over the whole prompt. 0: they do not exist at later
            events. Moments that differ only in their buffer are merged.
    """

    name = "query moments"
    full = True

    skip: int
    buffer: int = field(default=0, compare=False)

    @property
    def prompt_only(self) -> str:
        missing = "QueryMoments(buffer=...) does not say over how many of the newest queries to take them later"
        return "" if self.buffer else f"{_WHOLE_PROMPT}and {missing}"

    def merged(self, other: QueryMoments) -> QueryMoments:
        return max(self, other, key=lambda feature: feature.buffer)

    def rows(self, chunk: Chunk) -> Float[Tensor, "batch heads n dim"]:
        assert chunk.source is not None
        return chunk.source.undo(chunk.queries, chunk.positions)

    def distribution(self, moments: Moments, source: QuerySource, lengths: Int[Tensor, " batch"]) -> QueryDistribution:
        ahead = functools.cache(functools.partial(source.ahead, lengths))
        return QueryDistribution(moments.mean, moments.covariance, lambda rows, future: ahead(future)(rows))


@dataclass(frozen=True)
class HiddenMoments(_OfRows[HiddenDistribution]):
    """Mean and variance of the hidden states that enter the layer's attention.

    Attributes:
        skip: how many of the first tokens to leave out.
    """

    name = "hidden-state moments"
    hidden_states = True
    prompt_only = f"{_WHOLE_PROMPT}which only exist at the prompt's end"

    skip: int

    def rows(self, chunk: Chunk) -> Float[Tensor, "batch heads n dim"]:
        assert chunk.source is not None
        return chunk.source.hidden[:, None, : chunk.queries.shape[2]].float()

    def distribution(self, moments: Moments, source: QuerySource, lengths: Int[Tensor, " batch"]) -> HiddenDistribution:
        def queries(hidden: Tensor, future: int) -> Tensor:
            return source.queries(hidden, lengths, future)

        return HiddenDistribution(moments.mean[:, 0], moments.covariance[:, 0], queries)
