"""`Observer`: what layers' events look at besides entries. Collects it, and says it as an Observation does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core import tables
from keepset.core.accumulator import Chunk, QuerySource, RequestKeys, Turn
from keepset.core.feature import Feature, Needs
from keepset.core.features.moments import QueryMoments
from keepset.core.features.runtime_features import ModelStatistics, ModelTables
from keepset.core.features.window import WindowAttention, WindowSums
from keepset.core.rope import RotaryTable, matches_unrotated
from keepset.core.shapes import HiddenStates, Queries
from keepset.core.statistics import load
from keepset.errors import UnsupportedModelError
from keepset.kernels.moments import Moments
from keepset.kernels.paged_arguments import ColumnTarget
from keepset.paged.engine import Pages, QueryProjection
from keepset.paged.entry_columns import POSITION, EntryColumns
from keepset.paged.event_pages import OccupiedPages
from keepset.paged.eviction_event import EvictionEvent
from keepset.paged.pages import add_received
from keepset.paged.passing import PassingQueries
from keepset.paged.private_window_sums import OwnSums
from keepset.paged.query_operations import PromptChunk, QueryAddition
from keepset.recording.features import Recording


class Observer:
    """A group's; `needs` is what the recipe looks at, and the rest as in `LayerGroup`."""

    def __init__(
        self,
        needs: Needs,
        recording: Recording,
        passing: PassingQueries,
        own: OwnSums,
        scaling: float,
        rotary: RotaryTable | None,
        projections: Sequence[QueryProjection],
    ) -> None:
        self._own = own
        self._needs, self._recording, self._passing = needs, recording, passing
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
        source = self._query_source(range(place, place + 1), slice(chunk.first_query, chunk.end_query))
        if self._needs.hidden_states:
            assert source is not None
            few = slice(-4, None)
            self.check(place, source.undo(rows[:, :, few], positions[:, few]), source.hidden[:, few])

        def entries() -> RequestKeys:
            keys = pages.read_keys(chunk.subpages)
            return [(keys[:, : chunk.position + len(own)], slice(None))]

        step = Chunk(rows, entries, positions, None, self._scaling, source=source, start=chunk.position)
        chunk.layers[place].add(step)

    def add_up(
        self,
        places: range,
        addition: QueryAddition,
        queries: Float[Tensor, "layers n query_heads head_dim"] | None,
        pages: Sequence[Pages],
        columns: EntryColumns,
    ) -> None:
        """Adds to what passing queries leave behind in layers; `queries` are the step's, where some of those are."""
        rows = self._passing.added(places, addition, queries)
        for feature in self._recording.sums:
            last = feature.last_visible(addition.positions, addition.points)
            last = last.masked_fill(~self._counts(feature, addition), -1)
            own = [None if of is None else self._own_column(*of, feature, last.device) for of in addition.owners]
            received = ColumnTarget(
                columns[feature.column],
                last,
                addition.unwritten,
                self._scaling,
                feature.sums_of,
                columns.bias,
                columns[POSITION] if feature.history and POSITION in columns else None,
                own,
            )
            add_received(pages, places, rows, addition.entries(), received)
        if not addition.ends_prompt:
            source = self._query_source(places, slice(0))
            for of in self._recording.moments:
                assert source is not None
                exists = self._counts(of, addition)
                for some in self._passing.moments_at_once(places, len(addition.slots)):
                    few = rows.of_layers(range(some.start - places.start, some.stop - places.start))
                    self._passing.add_moments(some, of, addition, few, exists, self._scaling, source)

    def _own_column(
        self, slot: int, tokens: int, feature: WindowAttention, device: torch.device
    ) -> Float[Tensor, "layers kv_heads places *group"]:
        """Of a request that others may share pages with: its entries' numbers, which are not at the pages' slots."""
        return self._own.column(slot, feature.column, feature.sums_of.shape(self._recording.group), tokens, device)

    def _counts(self, feature: WindowAttention | QueryMoments, addition: QueryAddition) -> Bool[Tensor, "rows n"]:
        """Which of the queries are in its window and not yet added up."""
        begins = addition.points - self._recording.window(feature, addition.ends_prompt)
        return addition.positions >= begins.maximum(addition.begins)[:, None]

    def parts(
        self, event: EvictionEvent, places: range, occupied: OccupiedPages, columns: EntryColumns, width: int
    ) -> dict[str, Any]:
        """All of it at an event of these layers, for `width` entries, as an Observation's keyword arguments."""
        parts: dict[str, Any] = {"scaling": self._scaling}
        if number := self._needs.newest:
            parts["queries"], positions = self._newest(event, places, number)
            # The default says that nothing is missing, which is cheaper.
            if event.compressed or not event.equal_heads or event.earliest < number:
                parts["query_positions"] = positions
        features = self._from_files | self._sums(event, places, occupied, columns, width)
        collected = self._of_prompts(event, places, width) if event.ends_prompt else self._of_newest(event, places)
        return {**parts, "features": features | collected}

    def _sums(
        self, event: EvictionEvent, places: range, occupied: OccupiedPages, columns: EntryColumns, width: int
    ) -> dict[Feature[Any], Any]:
        sums = self._recording.sums
        if not sums:
            return {}
        slots = columns.slots(occupied.subpages)[..., :width]
        there = torch.arange(width, device=slots.device) < (occupied.entries - event.newer)[..., None]
        made: dict[Feature[Any], Any] = {}
        for feature in sums:
            received = columns.read(feature.column, slots)
            by_layer = received.unflatten(0, (len(places), -1))
            for row, record in enumerate(event.records):
                if record.own:
                    own = self._own_column(record.slot, width, feature, slots.device)
                    by_layer[:, row] = own[places.start : places.stop, :, :width]
            there_is = there.view(*there.shape, *[1] * (received.dim() - there.dim()))
            made[feature] = WindowSums(received.where(there_is, 0), self._recording.window(feature, event.ends_prompt))
        return made

    def _of_prompts(self, event: EvictionEvent, places: range, width: int) -> dict[Feature[Any], Any]:
        prompts = [record.chunks[place] for place in places for record in event.records if record.chunks]
        return prompts[0].merged_with(prompts[1:]).values(event.at.repeat(len(places)), width) if prompts else {}

    def _of_newest(self, event: EvictionEvent, places: range) -> dict[Feature[Any], Any]:
        """What is made of the newest queries of an event while decoding."""
        features = [feature for feature in self._needs.of(QueryMoments) if feature.buffer]
        if not features:
            return {}
        source = self._query_source(places, slice(0))
        assert source is not None
        made: dict[Feature[Any], Any] = {}
        for feature in features:
            if feature in self._recording.moments:
                moments = self._passing.moments(feature, places, event.slots)
            else:
                window = self._recording.window(feature, ends_prompt=False)
                queries, positions = self._newest(event, places, window)
                chunk, moments = Chunk(queries, list, positions, None, self._scaling, source=source), Moments()
                feature.add(moments, chunk)
            made[feature] = feature.distribution(moments, source, event.at.repeat(len(places)))
        return made

    def _newest(self, event: EvictionEvent, places: range, size: int) -> tuple[Queries, Int[Tensor, "layers_rows n"]]:
        positions = event.at[:, None] + torch.arange(-size, 0, device=event.at.device)
        return self._passing.newest(places, event.slots, positions), positions.repeat(len(places), 1)

    def _query_source(self, places: range, tokens: slice) -> _QuerySource | None:
        if self._rotary is None:
            return None
        return _QuerySource(self._rotary, self._projections[places.start : places.stop], tokens)

    def check(self, place: int, queries: Queries, hidden: HiddenStates) -> None:
        """Compares, once for a layer, queries before rotation with what comes of their hidden states.

        Raises:
            UnsupportedModelError: the model makes its queries in another way than is known here.
        """
        if place in self._checked:
            return
        if not matches_unrotated(queries, self._projections[place].queries(hidden).float(), hidden.dtype):
            raise UnsupportedModelError(
                "This model makes queries of hidden states in a way that keepset does not know under vLLM: choose "
                "a method that does not look at hidden states, such as snapkv."
            )
        self._checked.add(place)


@dataclass(frozen=True)
class _QuerySource(QuerySource):
    """How layers make and rotate queries; `tokens` of the forward under way are the chunk's, which is of one layer.

    Where they make queries there is a projection for each row of a batch.
    """

    rotary: RotaryTable
    projections: Sequence[QueryProjection]
    tokens: slice

    @property
    def hidden(self) -> HiddenStates:
        hidden = self.projections[0].hidden
        assert hidden is not None
        return hidden[None, self.tokens]

    def undo(self, queries: Queries, positions: Int[Tensor, "batch n"]) -> Queries:
        return self.rotary.undo(queries, positions.clamp(min=0))  # what is before a text's beginning counts nowhere

    def ahead(self, lengths: Int[Tensor, " batch"], future: int) -> Turn:
        return lambda rows: self.rotary.rotate_ahead(rows, lengths, future)

    def queries(self, hidden: HiddenStates, lengths: Int[Tensor, " batch"], future: int) -> Queries:
        made, first = [], 0
        for projection, rows in groupby(self.projections):
            number = sum(1 for _ in rows)
            made.append(projection.queries(hidden[first : first + number]))
            first += number
        return self.rotary.rotate_ahead(torch.cat(made).float(), lengths, future)

    def merged_with(self, others: Sequence[_QuerySource]) -> _QuerySource:
        return replace(self, projections=[each for part in (self, *others) for each in part.projections])
