"""`Feature`: an input of methods besides entries. `Needs`: the features of a method. `Accumulator`: collects them."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.shapes import HiddenStates, Queries, QueryHeadScores
from keepset.errors import KeepsetError
from keepset.kernels.dispatch import upload
from keepset.kernels.softmax import Softmax

Value = TypeVar("Value")
AnyFeature = TypeVar("AnyFeature", bound="Feature[Any]")

Turn = Callable[[Tensor], Tensor]
"""Rotate rows `[batch, query_heads, n, head_dim]`, given before rotation."""

RequestKeys = Sequence[tuple[Float[Tensor, "kv_heads _ head_dim"], Tensor | slice]]
"""For each request the keys of its valid entries, and the indices of a chunk's queries that belong to it."""


class QuerySource(ABC):
    """A layer that makes queries of hidden states and rotates them."""

    @property
    @abstractmethod
    def hidden(self) -> HiddenStates:
        """The hidden states that entered the layer's attention with this chunk."""

    @abstractmethod
    def undo(self, queries: Queries, positions: Int[Tensor, "batch n"]) -> Queries:
        """Return this chunk's queries as they were before rotation, float32.

        Args:
            queries: queries after rotation.
            positions: their positions; negative for queries that do not exist.
        """

    @abstractmethod
    def ahead(self, lengths: Int[Tensor, " batch"], future: int) -> Turn:
        """Return a function that rotates rows by the mean rotation of the positions after each request.

        Args:
            lengths: tokens of each request.
            future: how many positions after them.
        """

    @abstractmethod
    def queries(self, hidden: HiddenStates, lengths: Int[Tensor, " batch"], future: int) -> Queries:
        """Return the queries that the layer makes of other hidden states, at the rotation of `ahead`.

        Args:
            hidden: hidden states as they come to the layer.
            lengths, future: as for `ahead`.
        """

    def merged_with(self, following: Sequence[Self]) -> QuerySource:
        """Return the source for these requests and, after them, those of others; in one layer any source will do."""
        return self


@dataclass(frozen=True, eq=False)
class Chunk:
    """One step of one layer: `n` new tokens after those that came before.

    Attributes:
        queries: queries after rotation.
        entries: makes the entries so far, including this chunk's, for an accumulator that looks at them.
        positions, valid: position of each new token, and which of them are real; None if all are.
        softmax: how the model makes attention of query-key products.
        lse: log-sum-exp of every query's logits, if attention has computed it already.
        source: given if a feature needs queries before rotation or hidden states.
        start: position of the first token, if all requests have the same and the host knows it.
        host_positions: the tokens' positions on the host, negative for padding, if `start` is None and it knows them.
    """

    queries: Queries
    entries: Callable[[], RequestKeys]
    positions: Int[Tensor, "batch n"]
    valid: Bool[Tensor, "batch n"] | None
    softmax: Softmax
    lse: list[Tensor] | None = None
    source: QuerySource | None = None
    start: int | None = None
    host_positions: Int[Tensor, "batch n"] | None = None

    def every(self, stride: int, request: int) -> Tensor | slice:
        """Return which of a request's tokens have positions that are multiples of `stride`.

        Args:
            stride: the distance of the positions.
            request: the row of the batch.
        """
        if self.start is not None:
            return slice(-self.start % stride, None, stride)
        if self.host_positions is None:
            return self.counted(0)[request] & (self.positions[request] % stride == 0)
        chosen = (self.host_positions[request] >= 0) & (self.host_positions[request] % stride == 0)
        return upload(chosen.nonzero()[:, 0], self.positions.device)

    def counted(self, skip: int) -> Bool[Tensor, "batch n"]:
        """Return which tokens exist and are not among the first `skip` of their request."""
        counted = self.positions >= skip
        return counted if self.valid is None else counted & self.valid


class Accumulator(ABC):
    """Collects all features of one kind, each once.

    `add` never writes into a tensor that it replaces, so copies may share tensors.
    """

    @abstractmethod
    def __init__(self, features: Sequence[Any]) -> None: ...

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Take in one chunk."""

    @abstractmethod
    def merged_with(self, following: Sequence[Self]) -> Self:
        """Return an accumulator of these requests and, after them, those of others."""

    @abstractmethod
    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[Any, Any]:
        """Return what was collected, by feature.

        Args:
            width: the least number of entries of the result.
        """


def widened(columns: Sequence[Float[Tensor, "query_heads _"]], width: int) -> QueryHeadScores:
    """Return one column statistic of several requests, zero where one has no entry; at least `width` entries wide.

    Args:
        columns: one for each request.
        width: the least number of entries.
    """
    longest = max(width, *(column.shape[-1] for column in columns))
    return torch.stack([F.pad(column, (0, longest - column.shape[-1])) for column in columns])


class Feature(ABC, Generic[Value]):
    """One thing that a method can look at; `observation[feature]` is its value.

    A subclass is a frozen dataclass in `keepset/core/features` that tells a runtime all it has to know. Equal features
    are collected once for all methods that look at them. A feature that is collected while a prompt runs has an
    `accumulator`, which every runtime calls; runtimes provide the others themselves (`runtime_features.py`).

    Attributes:
        window: how many of the newest queries are recorded for it: at every event, or only at the prompt's end if it
            is `summed`.
        summed: whether, after the prompt, it is summed per entry while the queries of its window come.
        unrotated: whether it reads queries before rotation, or rotates queries to future positions.
        hidden_states: whether it reads the hidden states that enter the layer's attention.
        log_sum_exp: whether the log-sum-exp of the prompt's attention saves it work.
        transformers_only: why no paged runtime has it, as the end of a sentence about a method; `{engine}` stands for
            the engine's name.
        accumulator: the class that collects features of this kind over a prompt; None if a runtime provides them
            itself.
    """

    window: int = 0
    summed: ClassVar[bool] = False
    unrotated: ClassVar[bool] = False
    hidden_states: ClassVar[bool] = False
    log_sum_exp: ClassVar[bool] = False
    transformers_only: ClassVar[str] = ""
    accumulator: ClassVar[type[Accumulator] | None] = None

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name in words, for the catalogue of methods."""

    @property
    def prompt_only(self) -> str:
        """Return why it does not exist after the prompt, as the end of a sentence about a recipe; "" if it exists."""
        return ""

    @property
    def key(self) -> Hashable:
        """Return the key under which features are merged into one."""
        return self

    @property
    def cost(self) -> Hashable:
        """Return the key under which its collection time is filed; features collected together share it."""
        return type(self)

    def merged(self, other: Self) -> Self:
        """Return the feature that serves both this one and another of the same key."""
        return self

    def of(self, observation: Any) -> Value:
        """Compute the value from the rest of an observation, if it was not collected.

        Args:
            observation: an `Observation`, whose module imports this one.

        Raises:
            KeepsetError: if the observation does not determine it.
        """
        raise self.missing()

    def missing(self) -> KeepsetError:
        """Return the error for a missing value."""
        return KeepsetError(
            f"This method looks at {self.name}, which its traits do not name: put {self!r} into their needs, or give "
            f"Observation(features={{{self!r}: ...}})."
        )


class Needs:
    """The features that a method looks at, beyond keys, values and positions; `a | b` serves two methods.

    Args:
        features: the features, in the order in which the catalogue names them. A runtime collects exactly these.
    """

    def __init__(self, *features: Feature[Any]) -> None:
        merged: dict[Hashable, Feature[Any]] = {}
        for feature in features:
            earlier = merged.get(feature.key)
            merged[feature.key] = feature if earlier is None else earlier.merged(feature)
        self._features = tuple(merged.values())

    def __iter__(self) -> Iterator[Feature[Any]]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def __or__(self, other: Needs) -> Needs:
        return Needs(*self, *other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Needs) and set(self) == set(other)

    def __hash__(self) -> int:
        return hash(frozenset(self))

    def __repr__(self) -> str:
        return f"Needs({', '.join(map(repr, self))})"

    def of(self, kind: type[AnyFeature]) -> list[AnyFeature]:
        """Return the features of one class."""
        return [feature for feature in self if isinstance(feature, kind)]

    def names(self) -> list[str]:
        """Return the features' names in words, for the catalogue of methods."""
        return [feature.name for feature in self]

    @property
    def window(self) -> int:
        """Return how many of the newest queries are needed at the prompt's end."""
        return max((feature.window for feature in self), default=0)

    @property
    def newest(self) -> int:
        """Return how many of the newest queries must still exist at an event after the prompt."""
        return max((feature.window for feature in self if not feature.summed), default=0)

    @property
    def unrotated(self) -> bool:
        """Return whether a runtime must know how queries are rotated."""
        return any(feature.unrotated for feature in self)

    @property
    def hidden_states(self) -> bool:
        """Return whether a runtime must see the layer's input, not only its queries, keys and values."""
        return any(feature.hidden_states for feature in self)

    @property
    def log_sum_exp(self) -> bool:
        """Return whether the log-sum-exp of the prompt's attention saves work."""
        return any(feature.log_sum_exp for feature in self)


class Accumulators:
    """Everything with an accumulator among some features, for one layer, over one or more chunks of a prompt.

    Args:
        needs: the features.

    Attributes:
        seconds: time that features took, by their `cost`. So a prefill that collects for many methods at once knows
            what each of them would have cost.
    """

    def __init__(self, needs: Iterable[Feature[Any]]) -> None:
        self.seconds: defaultdict[Hashable, float] = defaultdict(float)
        together: defaultdict[Hashable, list[Feature[Any]]] = defaultdict(list)
        for feature in needs:
            together[feature.cost].append(feature)
        self._parts = {
            cost: type(features[0]).accumulator(features)
            for cost, features in together.items()
            if type(features[0]).accumulator
        }

    def __bool__(self) -> bool:
        """Return whether anything is collected, for which every token of a prompt is needed."""
        return bool(self._parts)

    def add(self, chunk: Chunk) -> None:
        """Take in one chunk."""
        for cost, part in self._parts.items():
            with self.timed(cost):
                part.add(chunk)

    def fork(self) -> Self:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied.seconds = self.seconds.copy()
        copied._parts = {cost: copy.copy(part) for cost, part in self._parts.items()}
        return copied

    def merged_with(self, following: Sequence[Accumulators]) -> Accumulators:
        """Return accumulators of these requests and, after them, of others; all have reached their prompt's end."""
        if not following:
            return self
        copied = self.fork()
        for cost, part in self._parts.items():
            copied._parts[cost] = part.merged_with([other._parts[cost] for other in following])
        return copied

    def values(self, lengths: Int[Tensor, " batch"], width: int = 0) -> dict[Feature[Any], Any]:
        """Return what was collected, as an Observation's features.

        Args:
            width: the least number of entries of the result.
        """
        values: dict[Feature[Any], Any] = {}
        for cost, part in self._parts.items():
            with self.timed(cost):
                values |= part.values(lengths, width)
        return values

    @contextmanager
    def timed(self, cost: Hashable) -> Iterator[None]:
        """Return a context whose time is filed under this cost."""
        start = time.perf_counter()
        yield
        self.seconds[cost] += time.perf_counter() - start
