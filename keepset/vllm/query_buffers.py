"""`QueryBuffers`: the buffers for the queries of a process's layers, allocated before vLLM measures memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keepset.paged.query_records import slots_for
from keepset.recording.features import Recording
from keepset.recording.ring import QueryRing


class QueryBuffers:
    """The rings of all layers, and the tape to which layers copy their queries while a graph captures them.

    Groups of layers get consecutive parts.

    Args:
        recording: the plan of which queries are recorded.
        layers: the number of layers.
        requests: the most requests that run at once.
        heads, head_dim, dtype, device: those of a layer's queries.
        tokens: tokens of the longest step that a graph captures; 0 if none does.
    """

    def __init__(
        self,
        recording: Recording,
        layers: int,
        requests: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        tokens: int,
    ) -> None:
        self._ring = QueryRing(recording, layers, slots_for(requests), heads, head_dim, dtype, device)
        self._tape: Tensor | None = None
        if tokens and recording:
            self._tape = torch.zeros(layers, tokens, heads, head_dim, dtype=dtype, device=device)
        self._places: dict[str, int] = {}

    def ring(self, layers: Sequence[str]) -> QueryRing:
        """Return the rings of a group of layers, given by their names."""
        return self._ring.part(self._first(layers), len(layers))

    def tape(self, layers: Sequence[str]) -> Tensor | None:
        """Return the tape of the layers of these names; None if no graph captures queries."""
        first = self._first(layers)
        return None if self._tape is None else self._tape[first : first + len(layers)]

    def leave(self, layer: str, queries: Tensor) -> None:
        """Copy the queries of a step that a graph may capture to the tape.

        Args:
            layer: the layer's name.
            queries: its queries, after rotation; those beyond the length of the tape only pad the step.
        """
        if self._tape is not None:
            tape = self._tape[self._places[layer]]
            tape[: len(queries)].copy_(queries[: len(tape)])

    def _first(self, layers: Sequence[str]) -> int:
        """Return the index of a group's first layer in the buffers."""
        if layers[0] not in self._places:
            first = len(self._places)
            self._places |= {name: first + place for place, name in enumerate(layers)}
        return self._places[layers[0]]
