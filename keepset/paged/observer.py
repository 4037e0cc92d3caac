"""`Observer`: what one layer's events look at besides entries. Collects it, and says it as an Observation does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core import accumulate
from keepset.core.accumulate import Accumulators, Entries, QuerySource, Turn
from keepset.core.feature import Feature
from keepset.core.features.model_statistics import ModelStatistics
from keepset.core.rope import RotaryTable
from keepset.core.shapes import HiddenStates, Queries
from keepset.core.statistics import load
from keepset.paged.pages import Pages
from keepset.paged.planner import Chunk, Event, Planner


@runtime_checkable
class LayerInput(Protocol):
    """The hidden states that enter a layer's attention, and what the layer makes of others; an engine gives it."""

    hidden: Float[Tensor, "n hidden"] | None

    def queries(self, hidden: HiddenStates) -> Queries:
        """Queries that the layer makes of these hidden states, before rotation."""

    def check(self, queries: Queries, hidden: HiddenStates) -> None:
        """Refuses a model whose queries before rotation are not what `queries` makes of their hidden states."""


class Observer:
    """One layer's.

    Args:
        planner: of the layer's group.
        place: the layer's in it.
        scaling: what the model multiplies query-key products with.
        rotation: of the model, where the recipe looks at queries before rotation.
        source: the layer's input, where the recipe looks at hidden states.
    """

    def __init__(
        self, planner: Planner, place: int, scaling: float, rotation: RotaryTable | None, source: LayerInput | None
    ) -> None:
        self._place, self._windows, self._needs = place, planner.windows, planner.needs
        self._scaling, self._rotation, self._source = scaling, rotation, source
        self._statistics = {statistics: load(statistics.file) for statistics in planner.needs.of(ModelStatistics)}

    def collect(self, chunk: Chunk, queries: Float[Tensor, "n query_heads head_dim"], pages: Pages) -> None:
        """Takes in what one step brings of a prompt."""
        own = queries[chunk.first : chunk.last]
        positions = torch.arange(chunk.position, chunk.position + len(own), device=own.device)[None]
        rows = own.transpose(0, 1)[None]
        source = self._query_source(slice(chunk.first, chunk.last))
        if self._needs.hidden_states:
            assert source is not None and self._source is not None
            few = slice(-4, None)
            self._source.check(source.undo(rows[:, :, few], positions[:, few]), source.hidden[:, few])

        def entries() -> Entries:
            keys, _ = pages.read(chunk.subpages)
            return [(keys[:, : chunk.position + len(own)], slice(None))]

        step = accumulate.Chunk(rows, entries, positions, None, self._scaling, source=source)
        chunk.prompt.layers[self._place].add(step)

    def parts(self, event: Event, width: int, unbroken: bool) -> dict[str, Any]:
        """All of it at an event, as an Observation's keyword arguments.

        Args:
            event: what is compressed.
            width: places for entries, those that hold none included.
            unbroken: whether each holds one.
        """
        parts: dict[str, Any] = {"scaling": self._scaling}
        if self._needs.window:
            assert event.slots is not None and event.window is not None
            window = event.window[:, -self._needs.window :]
            parts["queries"] = self._windows.read(self._place, event.slots, window)
            if not unbroken or event.short:  # the default says that nothing is missing, which is cheaper
                parts["query_positions"] = window
        collected = self._of_prompts(event, width) if event.ends_prompt else self._of_newest(event)
        return {**parts, "features": {**self._statistics, **collected}}

    def _of_prompts(self, event: Event, width: int) -> dict[Feature[Any], Any]:
        prompts = [record.prompt.layers[self._place] for record in event.records if record.prompt is not None]
        return prompts[0].joined(prompts[1:]).values(event.at, width) if prompts else {}

    def _of_newest(self, event: Event) -> dict[Feature[Any], Any]:
        """What is made of the newest queries of an event while decoding."""
        newest = Accumulators(feature for feature in self._needs if feature.buffer)
        if not newest:
            return {}
        assert event.slots is not None and event.window is not None
        positions = event.window[:, -self._needs.buffer :]
        queries = self._windows.read(self._place, event.slots, positions)
        source = self._query_source(slice(0))
        newest.add(accumulate.Chunk(queries, list, positions, None, self._scaling, source=source))
        return newest.values(event.at)

    def _query_source(self, tokens: slice) -> _QuerySource | None:
        return None if self._rotation is None else _QuerySource(self._rotation, self._source, tokens)


@dataclass(frozen=True)
class _QuerySource(QuerySource):
    """How a layer makes and rotates queries; `tokens` of the forward under way are the chunk's."""

    rotation: RotaryTable
    layer_input: LayerInput | None
    tokens: slice

    @property
    def hidden(self) -> HiddenStates:
        assert self.layer_input is not None and self.layer_input.hidden is not None
        return self.layer_input.hidden[None, self.tokens]

    def undo(self, queries: Queries, positions: Int[Tensor, "batch n"]) -> Queries:
        return self.rotation.undo(queries, positions.clamp(min=0))  # what is before a text's beginning counts nowhere

    def ahead(self, lengths: Int[Tensor, " batch"], future: int) -> Turn:
        return lambda rows: self.rotation.rotate_ahead(rows, lengths, future)

    def queries(self, hidden: HiddenStates, lengths: Int[Tensor, " batch"], future: int) -> Queries:
        assert self.layer_input is not None
        return self.rotation.rotate_ahead(self.layer_input.queries(hidden).float(), lengths, future)
