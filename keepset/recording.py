"""Recording of the queries between two events, for every runtime: which features need them, and where they wait."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.feature import Chunk, Needs, QuerySource
from keepset.core.features.moments import QueryMoments
from keepset.core.features.queries import ReferenceQueries, WindowAttention
from keepset.kernels.columns import Moments
from keepset.kernels.page_layout import RecordedQueries
from keepset.kernels.softmax import Softmax
from keepset.recipe import Recipe

_MOST = 4
"""The most queries that wait in a slot until one product serves them all."""
_SHARE = 24
"""Waiting queries take at most the bytes of a request's entries divided by this."""
_AT_ONCE = 1 << 24
"""Numbers of covariances that are computed at a time, unless one layer has more: 64 MiB."""

SummedFeature = WindowAttention | QueryMoments
"""A feature that is computed while the queries of its window come."""


@dataclass(frozen=True)
class RecordedFeatures:
    """Features that a recipe computes from the queries between two events; the same for all layers.

    Attributes:
        sums: attention that is added to columns of the entries.
        moments: moments that are merged.
        reference: the newest queries that an event after the prompt sees once more; None if it sees none.
        newest: how many of the newest queries an event after the prompt reads directly.
        every: tokens from event to event; None if there is no event after the prompt, or only between turns.
    """

    sums: tuple[WindowAttention, ...]
    moments: tuple[QueryMoments, ...]
    reference: ReferenceQueries | None
    newest: int
    every: int | None

    @classmethod
    def of(cls, needs: Needs, every: int | None, turns: bool = False) -> RecordedFeatures:
        """Return the features recorded for a method.

        Args:
            needs: the method's features.
            every: tokens from event to event; None if there is no event after the prompt, or only between turns.
            turns: whether there are events between turns.
        """
        later = turns or every is not None
        moments = [feature for feature in needs.of(QueryMoments) if feature.buffer] if later else []
        references = [feature for feature in needs.of(ReferenceQueries) if feature.later and later]
        reference = references[0] if references else None  # all are merged into one
        newest = needs.newest if reference is None else max(needs.newest, reference.later)
        return RecordedFeatures(tuple(needs.of(WindowAttention)), tuple(moments), reference, newest, every)

    @property
    def added_up(self) -> tuple[SummedFeature, ...]:
        """Return all features that are computed while queries come."""
        return (*self.sums, *self.moments)

    def window(self, feature: SummedFeature, ends_prompt: bool = False) -> int:
        """Return how many queries before an event a summed feature covers.

        Args:
            feature: one of `added_up`.
            ends_prompt: whether the event is that at the prompt's end.
        """
        if ends_prompt:
            return feature.window
        width = feature.buffer if isinstance(feature, QueryMoments) else feature.window
        return width if self.every is None else min(width, self.every)

    def summed(self, ends_prompt: bool = False) -> int:
        """Return the most queries before an event that a summed feature covers."""
        return max([self.window(feature, ends_prompt) for feature in self.added_up], default=0)

    def reach(self, ends_prompt: bool = False) -> int:
        """Return how many of the newest queries before an event are recorded."""
        return max(self.newest, self.summed(ends_prompt))


def moments_nbytes(query_heads: int, head_dim: int) -> int:
    """Return the bytes of the moments of one request's queries: a mean and a covariance's triangle in float32.

    Args:
        query_heads: query heads of the model.
        head_dim: numbers of a query.
    """
    return 4 * query_heads * (head_dim * (head_dim + 1) // 2 + head_dim)


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
        every, keep, turns = recipe.schedule.every, recipe.budget.keep, recipe.schedule.turns
        needed = RecordedFeatures.of(recipe.method.traits.needs, every, turns)
        if turns:  # nobody knows when a turn ends, so all queries of the window wait until then
            waiting = max([needed.window(feature) for feature in needed.added_up], default=_MOST)
            newest = max(needed.newest, waiting)
            return cls(needed.sums, (), needed.reference, newest, every, waiting, group, drafts)
        waiting = _MOST
        if every is not None and isinstance(keep, int):  # an entry is a key and a value
            waiting = max(1, min(_MOST, 2 * (keep + every) // (_SHARE * group)))
        heavy = max(moments_nbytes(1, head_dim) // (head_dim * itemsize), waiting)
        moments = tuple(feature for feature in needed.moments if needed.window(feature) > heavy)
        direct_windows = [needed.window(feature) for feature in needed.moments if feature not in moments]
        drafts = 0 if every is None else drafts
        newest = max([needed.newest, *direct_windows])
        return cls(needed.sums, moments, needed.reference, newest, every, waiting, group, drafts)

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


class QueryRing:
    """Queries of requests in slots, each a ring buffer, and moments of the queries that have left it.

    The query at position p lies at p modulo the ring's size. A request has the same slot in every layer.

    Args:
        recording: the recorded features, which determine the size of a slot and the moments.
        layers, slots: the numbers of layers and of requests.
        query_heads, head_dim, dtype, device: those of a layer's queries.
    """

    def __init__(
        self,
        recording: Recording,
        layers: int,
        slots: int,
        query_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        self._rings = torch.zeros(layers, slots, recording.size, query_heads, head_dim, dtype=dtype, device=device)
        triangle = head_dim * (head_dim + 1) // 2
        parts = {"count": (1, 1), "mean": (query_heads, head_dim), "scatter": (query_heads, triangle)}
        self._moments = {
            feature: {
                name: torch.zeros(layers, slots, *part, dtype=torch.float32, device=device)
                for name, part in parts.items()
            }
            for feature in recording.moments
        }
        self._held: dict[tuple[int, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated, without queries that are held only for a step."""
        return self._rings.nbytes + sum(part.nbytes for parts in self._moments.values() for part in parts.values())

    @property
    def dtype(self) -> torch.dtype:
        """The type of a query."""
        return self._rings.dtype

    def of_request(self, queries: int) -> tuple[int, int, int]:
        """Return the shape of so many queries of one request in one layer, `[query_heads, queries, head_dim]`."""
        return self._rings.shape[3], queries, self._rings.shape[4]

    def part(self, first: int, layers: int) -> QueryRing:
        """Return a view of `layers` layers from layer `first` on.

        Args:
            first: the first of these layers.
            layers: how many.
        """
        part = copy.copy(self)
        part._rings = self._rings[first : first + layers]
        part._moments = {
            feature: {name: whole[first : first + layers] for name, whole in parts.items()}
            for feature, parts in self._moments.items()
        }
        part._held = {}
        return part

    def record(
        self,
        layers: range,
        queries: Float[Tensor, "layers n query_heads head_dim"],
        slots: Int[Tensor, " n"],
        ring_indices: Int[Tensor, " n"],
    ) -> None:
        """Write queries into the rings of these layers.

        Args:
            layers: the layers.
            queries: after rotation.
            slots: the slot of each query's request.
            ring_indices: the position of each query modulo the ring's size.
        """
        self._rings[layers.start : layers.stop, slots, ring_indices] = queries

    def hold(self, layer: int, slot: int, queries: Float[Tensor, "n query_heads head_dim"]) -> None:
        """Store a copy of queries that are too many for a ring, until `held` removes it.

        Args:
            layer: the layer.
            slot: the request's slot.
            queries: after rotation.
        """
        self._held[layer, slot] = queries.clone()

    def held(self, layers: range, slot: int) -> RecordedQueries:
        """Remove and return the queries that were held in some layers.

        Args:
            layers: the layers.
            slot: the request's slot.
        """
        return of_step(torch.stack([self._held.pop((layer, slot)) for layer in layers]))

    def at(self, layers: range, slots: Int[Tensor, " rows"], positions: Int[Tensor, "rows n"]) -> RecordedQueries:
        """Return queries by reference; nothing is copied.

        Args:
            layers: the layers.
            slots: the slot of each request.
            positions: of the queries.
        """
        rings = self._rings[layers.start : layers.stop]
        return RecordedQueries(rings, slots, positions % rings.shape[2])

    def newest(
        self, layers: range, slots: Int[Tensor, " rows"], positions: Int[Tensor, "rows n"]
    ) -> Float[Tensor, "layers_rows query_heads n head_dim"]:
        """Return a copy of queries; zero for negative positions.

        Args:
            layers: the layers.
            slots: the slot of each request.
            positions: of the queries.
        """
        queries = self._rings[layers.start : layers.stop, slots[:, None], positions % self._rings.shape[2]]
        return queries.masked_fill((positions < 0)[..., None, None], 0).transpose(2, 3).flatten(0, 1)

    # --- moments

    def layers_at_once(self, rows: int) -> int:
        """Return how many layers' covariances, for each query head of `rows` requests, fit the workspace."""
        query_heads, head_dim = self._rings.shape[3:]
        return max(1, _AT_ONCE // (rows * query_heads * head_dim**2))

    def add_moments(
        self,
        feature: QueryMoments,
        layers: range,
        slots: Int[Tensor, " rows"],
        queries: RecordedQueries,
        positions: Int[Tensor, "rows n"],
        exists: Bool[Tensor, "rows n"],
        fresh: Bool[Tensor, " rows"],
        softmax: Softmax,
        source: QuerySource,
    ) -> None:
        """Add queries to the moments of their requests, as many layers at a time as fit the workspace.

        Args:
            feature: the moments' feature.
            layers: the layers.
            slots: the slot of each request.
            queries: of these layers.
            positions: of the queries.
            exists: which of the queries exist.
            fresh: which requests have no moments yet.
            softmax: the model's softmax.
            source: tells how queries are rotated.
        """
        parts, together = self._moments[feature], self.layers_at_once(len(slots))
        for first in range(layers.start, layers.stop, together):
            layer_range = range(first, min(first + together, layers.stop))
            of_rows = exists.repeat(len(layer_range), 1)
            layer_queries = queries.of_layers(range(layer_range.start - layers.start, layer_range.stop - layers.start))
            layer_queries = layer_queries.masked_fill(~of_rows[:, None, :, None], 0)  # the ring may hold anything
            moments = self.moments(feature, layer_range, slots, fresh)
            chunk = Chunk(layer_queries, list, positions.repeat(len(layer_range), 1), of_rows, softmax, source=source)
            feature.add(moments, chunk)
            for name, part in moments.tensors.items():
                parts[name][layer_range.start : layer_range.stop, slots] = part.unflatten(0, (len(layer_range), -1))

    def moments(
        self,
        feature: QueryMoments,
        layers: range,
        slots: Int[Tensor, " rows"],
        fresh: Bool[Tensor, " rows"] | None = None,
    ) -> Moments:
        """Return a copy of the moments of some requests; zero for those that are `fresh`.

        Args:
            feature: the moments' feature.
            layers: the layers.
            slots: the slot of each request.
            fresh: which requests have no moments yet; None if all have some.
        """
        parts = self._moments[feature]
        chosen = {name: part[layers.start : layers.stop, slots].flatten(0, 1) for name, part in parts.items()}
        if fresh is not None:
            none = fresh.repeat(len(layers))[:, None, None]
            chosen = {name: part.masked_fill(none, 0) for name, part in chosen.items()}
        return Moments.of(chosen, feature.full)


def of_step(queries: Float[Tensor, "layers n query_heads head_dim"]) -> RecordedQueries:
    """Return the queries of one request that are in no ring."""
    n, device = queries.shape[1], queries.device
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    return RecordedQueries(queries[:, None], slots, torch.arange(n, device=device)[None])
