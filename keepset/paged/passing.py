"""`PassingQueries`: what layers hold of queries that pass before an event."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.accumulator import Chunk, QuerySource
from keepset.core.features.moments import QueryMoments
from keepset.core.shapes import Queries
from keepset.kernels.moments import Moments
from keepset.kernels.paged_arguments import RecordedQueries
from keepset.paged.query_operations import HeldQueries, QueryAddition, QueryCapture
from keepset.recording.features import Recording

_AT_ONCE = 1 << 24
"""Numbers of covariances that are made at a time, if not of one layer: 64 MiB."""


class PassingQueries:
    """Rings of the newest queries, and moments of those that came before; all of it is allocated at once.

    Args:
        recording: the recipe's.
        layers, slots: how many of them, and for how many requests.
        query_heads, head_dim, dtype, device: of a layer's queries.
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
        shape = (layers, slots, recording.size, query_heads, head_dim)
        self._rings = torch.zeros(shape, dtype=dtype, device=device)
        """Position p lies at p mod size."""
        triangle = head_dim * (head_dim + 1) // 2
        parts = {"count": (1, 1), "mean": (query_heads, head_dim), "scatter": (query_heads, triangle)}
        self._moments = {
            feature: {name: torch.zeros(layers, slots, *part, device=device) for name, part in parts.items()}
            for feature in recording.moments
        }
        self._held: dict[tuple[int, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated, without queries that are held for a step."""
        return self._rings.nbytes + sum(part.nbytes for parts in self._moments.values() for part in parts.values())

    def part(self, first: int, layers: int) -> PassingQueries:
        """Some layers' part of the same room."""
        part = copy.copy(self)
        part._rings = self._rings[first : first + layers]
        part._moments = {
            feature: {name: whole[first : first + layers] for name, whole in parts.items()}
            for feature, parts in self._moments.items()
        }
        part._held = {}
        return part

    def record(self, places: range, queries: Float[Tensor, "layers n heads dim"], capture: QueryCapture) -> None:
        """Writes a step's queries that are captured to places of these layers' rings."""
        self._rings[places.start : places.stop, capture.slots, capture.places] = queries

    def hold(self, place: int, queries: Float[Tensor, "tokens heads dim"], held: HeldQueries) -> None:
        """Holds some of a step's queries in a layer until they are added up."""
        self._held[place, held.slot] = queries[held.first_query : held.end_query].clone()

    def newest(
        self, places: range, slots: Int[Tensor, " rows"], positions: Int[Tensor, "rows n"]
    ) -> Float[Tensor, "layers_rows heads n dim"]:
        """Queries of layers' rings at these positions; those before a text's beginning are zero, whatever is there."""
        queries = self._rings[places.start : places.stop, slots[:, None], positions % self._rings.shape[2]]
        return queries.masked_fill((positions < 0)[..., None, None], 0).transpose(2, 3).flatten(0, 1)

    def added(
        self, places: range, addition: QueryAddition, queries: Float[Tensor, "layers tokens heads dim"] | None
    ) -> RecordedQueries:
        """The queries of layers that are added up; `queries` are the step's, where some of those are."""
        at = addition.positions
        if addition.held is not None:
            rows = torch.stack([self._held.pop((place, addition.held)) for place in places])
        elif addition.first_query is not None:
            assert queries is not None
            rows = queries[:, addition.first_query : addition.first_query + at.shape[1]]
        else:
            rings = self._rings[places.start : places.stop]
            return RecordedQueries(rings, addition.slots, at % rings.shape[2])
        return RecordedQueries(
            rows[:, None], torch.zeros_like(addition.slots), torch.arange(at.shape[1], device=at.device)[None]
        )

    def layers_at_once(self, rows: int) -> int:
        """Of how many layers there is room for a covariance of each query head of so many requests."""
        query_heads, head_dim = self._rings.shape[3:]
        return max(1, _AT_ONCE // (rows * query_heads * head_dim**2))

    def moments_at_once(self, places: range, rows: int) -> Iterator[range]:
        """As many of the layers at a time as there is room for what moments of so many requests take meanwhile."""
        together = self.layers_at_once(rows)
        for first in range(places.start, places.stop, together):
            yield range(first, min(first + together, places.stop))

    def add_moments(
        self,
        places: range,
        feature: QueryMoments,
        addition: QueryAddition,
        queries: Queries,
        exists: Bool[Tensor, "rows n"],
        scaling: float,
        source: QuerySource,
    ) -> None:
        """Makes moments of layers' queries, layer after layer, too, of which these exist in each."""
        layers, parts = len(places), self._moments[feature]
        exists, positions = exists.repeat(layers, 1), addition.positions.repeat(layers, 1)
        queries = queries.masked_fill(~exists[:, None, :, None], 0)  # whatever lies there
        chunk = Chunk(queries, list, positions, exists, scaling, source=source)
        fresh = (addition.unwritten >= addition.lengths).repeat(layers)[:, None, None]
        moments = self.moments(feature, places, addition.slots, fresh)
        feature.add(moments, chunk)
        for name, part in moments.tensors.items():
            parts[name][places.start : places.stop, addition.slots] = part.unflatten(0, (layers, -1))

    def moments(
        self,
        feature: QueryMoments,
        places: range,
        slots: Int[Tensor, " rows"],
        fresh: Bool[Tensor, "layers_rows 1 1"] | None = None,
    ) -> Moments:
        """What was made of the queries of these requests in these layers; nothing yet of those that are `fresh`."""
        parts = self._moments[feature]
        chosen = {name: part[places.start : places.stop, slots].flatten(0, 1) for name, part in parts.items()}
        if fresh is not None:
            chosen = {name: part.masked_fill(fresh, 0) for name, part in chosen.items()}
        return Moments.of(chosen, feature.full)
