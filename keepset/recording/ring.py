"""`QueryRing`: the newest queries of requests, and moments of older ones, by layer and slot; allocated once."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.accumulator import Chunk, QuerySource
from keepset.core.features.moments import QueryMoments
from keepset.kernels.moments import Moments
from keepset.kernels.paged_arguments import RecordedQueries
from keepset.kernels.softmax import Softmax
from keepset.recording.features import Recording

_AT_ONCE = 1 << 24
"""Numbers of covariances that are computed at a time, unless one layer has more: 64 MiB."""


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
            feature: {name: torch.zeros(layers, slots, *part, device=device) for name, part in parts.items()}
            for feature in recording.moments
        }
        self._held: dict[tuple[int, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated, without queries that are held only for a step."""
        return self._rings.nbytes + sum(part.nbytes for parts in self._moments.values() for part in parts.values())

    def part(self, first: int, layers: int) -> QueryRing:
        """Return a view of `layers` layers from layer `first` on."""
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
        places: Int[Tensor, " n"],
    ) -> None:
        """Write queries into the rings of these layers; a place is a position modulo the ring's size."""
        self._rings[layers.start : layers.stop, slots, places] = queries

    def hold(self, layer: int, slot: int, queries: Float[Tensor, "n query_heads head_dim"]) -> None:
        """Store a copy of queries that are too many for a ring, until `held` removes it."""
        self._held[layer, slot] = queries.clone()

    def held(self, layers: range, slot: int) -> RecordedQueries:
        """Remove and return the queries that were held in some layers."""
        return of_step(torch.stack([self._held.pop((layer, slot)) for layer in layers]))

    def at(self, layers: range, slots: Int[Tensor, " rows"], positions: Int[Tensor, "rows n"]) -> RecordedQueries:
        """Return queries by reference; nothing is copied."""
        rings = self._rings[layers.start : layers.stop]
        return RecordedQueries(rings, slots, positions % rings.shape[2])

    def newest(
        self, layers: range, slots: Int[Tensor, " rows"], positions: Int[Tensor, "rows n"]
    ) -> Float[Tensor, "layers_rows query_heads n head_dim"]:
        """Return a copy of queries; zero for negative positions."""
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
        """Add queries to the moments of their requests, as many layers at a time as fit the workspace."""
        parts, together = self._moments[feature], self.layers_at_once(len(slots))
        for first in range(layers.start, layers.stop, together):
            some = range(first, min(first + together, layers.stop))
            of_rows = exists.repeat(len(some), 1)
            own = queries.of_layers(range(some.start - layers.start, some.stop - layers.start))
            own = own.masked_fill(~of_rows[:, None, :, None], 0)  # the ring may hold anything
            moments = self.moments(feature, some, slots, fresh)
            chunk = Chunk(own, list, positions.repeat(len(some), 1), of_rows, softmax, source=source)
            feature.add(moments, chunk)
            for name, part in moments.tensors.items():
                parts[name][some.start : some.stop, slots] = part.unflatten(0, (len(some), -1))

    def moments(
        self,
        feature: QueryMoments,
        layers: range,
        slots: Int[Tensor, " rows"],
        fresh: Bool[Tensor, " rows"] | None = None,
    ) -> Moments:
        """Return a copy of the moments of some requests; zero for those that are `fresh`."""
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
