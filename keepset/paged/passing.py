"""`PassingQueries`: what one layer holds of queries that pass before an event."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.accumulator import Chunk, QuerySource
from keepset.core.features.moments import QueryMoments
from keepset.core.shapes import Queries
from keepset.kernels.moments import Moments
from keepset.paged.recording import Recording
from keepset.paged.step import HeldQueries, QueryAddition, QueryCapture


class PassingQueries:
    """Rings of the newest queries, and moments of those that came before; all of it is allocated at once.

    Args:
        recording: the recipe's.
        slots: requests that there is room for.
        query_heads, head_dim, dtype, device: of the layer's queries.
    """

    def __init__(
        self,
        recording: Recording,
        slots: int,
        query_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        shape = (slots, recording.size, query_heads, head_dim)
        self._rings = torch.zeros(shape, dtype=dtype, device=device)
        """Position p lies at p mod size."""
        triangle = head_dim * (head_dim + 1) // 2
        shapes = {"count": (1, 1), "mean": (query_heads, head_dim), "scatter": (query_heads, triangle)}
        self._moments = {
            feature: {name: torch.zeros(slots, *shape, device=device) for name, shape in shapes.items()}
            for feature in recording.moments
        }
        self._held: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated, without queries that are held for a step."""
        return self._rings.nbytes + sum(part.nbytes for parts in self._moments.values() for part in parts.values())

    def record(self, queries: Float[Tensor, "n heads dim"], capture: QueryCapture) -> None:
        """Writes some of a step's queries to places of the rings."""
        self._rings[capture.slots, capture.places] = queries[capture.queries]

    def hold(self, queries: Float[Tensor, "n heads dim"], held: HeldQueries) -> None:
        """Holds some of a step's queries until they are added up."""
        self._held[held.slot] = queries[held.first_query : held.end_query].clone()

    def newest(self, slots: Int[Tensor, " rows"], positions: Int[Tensor, "rows n"]) -> Queries:
        """Queries of the rings at these positions; those before a text's beginning are zero, whatever lies there."""
        queries = self._rings[slots[:, None], positions % self._rings.shape[1]]
        return queries.masked_fill((positions < 0)[..., None, None], 0).transpose(1, 2)

    def added(self, addition: QueryAddition, queries: Float[Tensor, "n heads dim"]) -> Queries:
        """The queries that are added up; `queries` are the step's."""
        if addition.held is not None:
            rows = self._held.pop(addition.held)
        elif addition.first_query is not None:
            rows = queries[addition.first_query : addition.first_query + addition.positions.shape[1]]
        else:
            return self.newest(addition.slots, addition.positions)
        return rows.transpose(0, 1)[None]

    def add_moments(
        self,
        feature: QueryMoments,
        addition: QueryAddition,
        queries: Queries,
        exists: Bool[Tensor, "rows n"],
        scaling: float,
        source: QuerySource,
    ) -> None:
        """Makes moments of queries, too, of which these exist."""
        chunk = Chunk(queries, list, addition.positions, exists, scaling, source=source)
        rows, counted = feature.rows(chunk, source), chunk.counted(feature.skip)
        parts, fresh = self._moments[feature], addition.unwritten >= addition.lengths
        moments = Moments.of(
            {name: part[addition.slots].masked_fill(fresh[:, None, None], 0) for name, part in parts.items()},
            feature.full,
        )
        moments.add(rows, counted, feature.full)
        for name, part in moments.tensors.items():
            parts[name][addition.slots] = part

    def moments(self, feature: QueryMoments, slots: Int[Tensor, " rows"]) -> Moments:
        """What was made of the queries of these requests."""
        return Moments.of({name: part[slots] for name, part in self._moments[feature].items()}, feature.full)
