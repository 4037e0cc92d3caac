"""`Observer`: what layers' events look at besides entries. Collects it, and says it as an Observation does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core import tables
from keepset.core.accumulator import Accumulators, Chunk, Entries, QuerySource, Turn
from keepset.core.feature import Feature, Needs
from keepset.core.features.given import ModelStatistics, ModelTables
from keepset.core.features.window import WindowAttention
from keepset.core.observation import Observation
from keepset.core.rope import RotaryTable, undone_right
from keepset.core.shapes import HiddenStates, Queries
from keepset.core.statistics import load
from keepset.errors import UnsupportedModelError
from keepset.paged.engine import Pages, QueryProjection
from keepset.paged.query_windows import QueryWindows
from keepset.paged.step import EvictionEvent, PromptChunk


class Observer:
    """A group's; `needs` is what the recipe looks at, `every` its interval, and the rest as in `LayerGroup`."""

    def __init__(
        self,
        needs: Needs,
        every: int | None,
        windows: QueryWindows,
        scaling: float,
        rotary: RotaryTable | None,
        projections: Sequence[QueryProjection],
    ) -> None:
        self._needs, self._every, self._windows = needs, every, windows
        self._scaling, self._rotary, self._projections = scaling, rotary, projections
        self._checked: set[int] = set()
        self._from_files: dict[Feature[Any], Any] = {
            **{stats: load(stats.file) for stats in needs.of(ModelStatistics)},
            **{compiled: tables.load(compiled.file) for compiled in needs.of(ModelTables)},
        }

    def collect(
        self, place: int, chunk: PromptChunk, queries: Float[Tensor, "n query_heads head_dim"], pages: Pages
    ) -> None:
        """Takes in what one step brings of a prompt to a layer."""
        own = queries[chunk.first_query : chunk.end_query]
        positions = torch.arange(chunk.position, chunk.position + len(own), device=own.device)[None]
        rows = own.transpose(0, 1)[None]
        source = self._query_source(place, slice(chunk.first_query, chunk.end_query))
        if self._needs.hidden_states:
            assert source is not None
            few = slice(-4, None)
            self.check(place, source.undo(rows[:, :, few], positions[:, few]), source.hidden[:, few])

        def entries() -> Entries:
            keys, _ = pages.read(chunk.subpages)
            return [(keys[:, : chunk.position + len(own)], slice(None))]

        step = Chunk(rows, entries, positions, None, self._scaling, source=source)
        chunk.layers[place].add(step)

    def parts(self, event: EvictionEvent, places: range, width: int) -> dict[str, Any]:
        """All of it at an event of these layers, for `width` entries, as an Observation's keyword arguments."""
        parts: dict[str, Any] = {"scaling": self._scaling}
        if self._needs.window:
            parts["queries"], positions = self._newest(event, places, self._needs.window)
            # The default says that nothing is missing, which is cheaper.
            if event.compressed or not event.equal_heads or event.earliest < self._windows.window:
                parts["query_positions"] = positions
        collected = self._of_prompts(event, places, width) if event.ends_prompt else self._of_newest(event, places)
        return {**parts, "features": {**self._from_files, **collected}}

    def complete(self, observation: Observation, event: EvictionEvent) -> Observation:
        """With what is made of the newest queries and the entries, where an event has its own window of them."""
        if event.ends_prompt or self._every is None:
            return observation
        sums = self._needs.of(WindowAttention)
        return observation.having({each: each.made(observation, min(each.window, self._every)) for each in sums})

    def _of_prompts(self, event: EvictionEvent, places: range, width: int) -> dict[Feature[Any], Any]:
        prompts = [record.prompt[place] for place in places for record in event.records if record.prompt]
        return prompts[0].joined(prompts[1:]).values(event.at.repeat(len(places)), width) if prompts else {}

    def _of_newest(self, event: EvictionEvent, places: range) -> dict[Feature[Any], Any]:
        """What is made of the newest queries of an event while decoding."""
        newest = Accumulators(feature for feature in self._needs if feature.buffer)
        if not newest:
            return {}
        assert self._every is not None
        queries, positions = self._newest(event, places, min(self._needs.buffer, self._every))
        source = self._query_source(places[0], slice(0))
        newest.add(Chunk(queries, list, positions, None, self._scaling, source=source))
        return newest.values(event.at.repeat(len(places)))

    def _newest(self, event: EvictionEvent, places: range, size: int) -> tuple[Queries, Int[Tensor, "layers_rows n"]]:
        positions = event.at[:, None] + torch.arange(-size, 0, device=event.at.device)
        return self._windows.read(places, event.slots, positions), positions.repeat(len(places), 1)

    def _query_source(self, place: int, tokens: slice) -> _QuerySource | None:
        if self._rotary is None:
            return None
        return _QuerySource(self._rotary, self._projections[place] if self._projections else None, tokens)

    def check(self, place: int, queries: Queries, hidden: HiddenStates) -> None:
        """Compares, once for a layer, queries before rotation with what comes of their hidden states.

        Raises:
            UnsupportedModelError: the model makes its queries in another way than is known here.
        """
        if place in self._checked:
            return
        if not undone_right(queries, self._projections[place].queries(hidden).float(), hidden.dtype):
            raise UnsupportedModelError(
                "This model makes queries of hidden states in a way that keepset does not know under vLLM: choose "
                "a method that does not look at hidden states, such as snapkv."
            )
        self._checked.add(place)


@dataclass(frozen=True)
class _QuerySource(QuerySource):
    """How a layer makes and rotates queries; `tokens` of the forward under way are the chunk's."""

    rotary: RotaryTable
    projection: QueryProjection | None
    tokens: slice

    @property
    def hidden(self) -> HiddenStates:
        assert self.projection is not None and self.projection.hidden is not None
        return self.projection.hidden[None, self.tokens]

    def undo(self, queries: Queries, positions: Int[Tensor, "batch n"]) -> Queries:
        return self.rotary.undo(queries, positions.clamp(min=0))  # what is before a text's beginning counts nowhere

    def ahead(self, lengths: Int[Tensor, " batch"], future: int) -> Turn:
        return lambda rows: self.rotary.rotate_ahead(rows, lengths, future)

    def queries(self, hidden: HiddenStates, lengths: Int[Tensor, " batch"], future: int) -> Queries:
        assert self.projection is not None
        return self.rotary.rotate_ahead(self.projection.queries(hidden).float(), lengths, future)
