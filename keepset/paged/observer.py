"""`Observer`: collects the inputs of layers' events besides entries, and returns them as an Observation takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core import tables
from keepset.core.feature import Chunk, Feature, Needs, QuerySource, RequestKeys, Turn
from keepset.core.features.moments import QueryMoments
from keepset.core.features.queries import WindowSums
from keepset.core.features.runtime_features import ModelStatistics, ModelTables
from keepset.core.rope import RotaryTable, matches_unrotated
from keepset.core.shapes import HiddenStates, Queries
from keepset.core.statistics import HeadShare
from keepset.errors import UnsupportedModelError
from keepset.kernels.columns import Moments
from keepset.kernels.page_layout import ColumnTarget, RecordedQueries
from keepset.kernels.softmax import Softmax
from keepset.paged.engine import QueryProjection
from keepset.paged.entry_columns import POSITION, EntryColumns
from keepset.paged.eviction import EvictionEvent, OccupiedPages
from keepset.paged.pages import Pages, add_received, decoded_keys
from keepset.paged.query_records import PromptChunk, QueryAddition
from keepset.recording import QueryRing, Recording, SummedFeature, of_step


class Observer:
    """Everything that a group of layers collects for its events.

    Args:
        needs: the features of the recipe's method.
        recording: which queries are recorded.
        ring: the rings of queries.
        softmax: how the layers make attention of query-key products; its sinks are `[layers, query_heads]`.
        rotary: the model's rotation, if the recipe looks at queries before it.
        projections: one for each layer, if the recipe looks at hidden states.
        share: which of the model's heads this process has; None: all of them.
    """

    def __init__(
        self,
        needs: Needs,
        recording: Recording,
        ring: QueryRing,
        softmax: Softmax,
        rotary: RotaryTable | None,
        projections: Sequence[QueryProjection],
        share: HeadShare | None = None,
    ) -> None:
        self._needs, self._recording, self._ring = needs, recording, ring
        self.softmax, self._rotary, self._projections = softmax, rotary, projections
        self._checked: set[int] = set()
        self._from_files: dict[Feature[Any], Any] = {
            **{
                stats: stats.load() if share is None else stats.load().of_heads(share)
                for stats in needs.of(ModelStatistics)
            },
            **{compiled: tables.load(compiled.file) for compiled in needs.of(ModelTables)},
        }

    def collect(
        self, layer_index: int, chunk: PromptChunk, queries: Float[Tensor, "n query_heads head_dim"], pages: Pages
    ) -> None:
        """Take in the part of a prompt that a step brings to a layer.

        Args:
            layer_index: the layer, by its place in the group.
            chunk: which of the queries are the prompt's.
            queries: the step's queries of the layer, after rotation.
            pages: the layer's cache.
        """
        chunk_queries = queries[chunk.first_query : chunk.end_query]
        positions = torch.arange(chunk.position, chunk.position + len(chunk_queries), device=chunk_queries.device)[None]
        rows = chunk_queries.transpose(0, 1)[None]
        source = self._query_source(range(layer_index, layer_index + 1), slice(chunk.first_query, chunk.end_query))
        if self._needs.hidden_states:
            assert source is not None
            few = slice(-4, None)
            self.check(layer_index, source.undo(rows[:, :, few], positions[:, few]), source.hidden[:, few])

        def entries() -> RequestKeys:
            keys = decoded_keys(pages, chunk.subpages)
            return [(keys[:, : chunk.position + len(chunk_queries)], slice(None))]

        step = Chunk(
            rows, entries, positions, None, self.softmax.of_layer(layer_index), source=source, start=chunk.position
        )
        chunk.layers[layer_index].add(step)

    def add_up(
        self,
        layer_indices: range,
        addition: QueryAddition,
        queries: Float[Tensor, "layers n query_heads head_dim"] | None,
        pages: Sequence[Pages],
        columns: EntryColumns,
    ) -> None:
        """Add queries to the window sums and moments of their requests.

        Args:
            layer_indices: the layers, by their places in the group.
            addition: which queries are added, and for which event.
            queries: the step's queries of these layers, after rotation; None between steps.
            pages: the cache of each of these layers.
            columns: has the window sums.
        """
        waiting = self._waiting(layer_indices, addition, queries)
        for feature in self._recording.sums:
            last = feature.last_visible(addition.positions, addition.points)
            target = ColumnTarget(
                columns[feature.column],
                last.masked_fill(~self._counts(feature, addition), -1),
                addition.unwritten,
                self.softmax,
                feature.sums_of,
                columns.bias,
                columns[POSITION] if feature.history and POSITION in columns else None,
                [None if of is None else columns.private(of[0], feature.column, of[1]) for of in addition.owners],
            )
            add_received(pages, layer_indices, waiting, addition.entries(), target)
        if addition.ends_prompt or not self._recording.moments:
            return
        source, fresh = self._query_source(layer_indices, slice(0)), addition.unwritten >= addition.lengths
        assert source is not None
        for of in self._recording.moments:
            exists, at = self._counts(of, addition), addition.positions
            self._ring.add_moments(
                of, layer_indices, addition.slots, waiting, at, exists, fresh, self.softmax.without_sinks, source
            )

    def _waiting(
        self,
        layer_indices: range,
        addition: QueryAddition,
        queries: Float[Tensor, "layers n query_heads head_dim"] | None,
    ) -> RecordedQueries:
        """Return the queries that are summed: held ones, the step's own, or those in the rings.

        Args:
            layer_indices: indices of the layers in the group.
            addition: which queries are added.
            queries: the step's queries of these layers, after rotation; None between steps.
        """
        if addition.held is not None:
            return self._ring.held(layer_indices, addition.held)
        if addition.first_query is None:
            return self._ring.at(layer_indices, addition.slots, addition.positions)
        assert queries is not None
        return of_step(queries[:, addition.first_query : addition.first_query + addition.positions.shape[1]])

    def _counts(self, feature: SummedFeature, addition: QueryAddition) -> Bool[Tensor, "rows n"]:
        """Return which queries are in the feature's window and not summed yet.

        Args:
            feature: what is summed.
            addition: which queries are added, and for which events.
        """
        begins = addition.points - self._recording.window(feature, addition.ends_prompt)
        return addition.positions >= begins.maximum(addition.begins)[:, None]

    def parts(
        self, event: EvictionEvent, layer_indices: range, occupied: OccupiedPages, columns: EntryColumns, width: int
    ) -> dict[str, Any]:
        """Return everything collected for an event, as keyword arguments of an Observation.

        Args:
            event: the event.
            layer_indices: the layers, by their places in the group.
            occupied: where the entries lie.
            columns: has the window sums.
            width: entries of each head that the observation shows.
        """
        parts: dict[str, Any] = {"softmax": self.softmax.of_layer(layer_indices.start)}  # with sinks there is one layer
        if number := self._needs.newest:
            parts["queries"], positions = self.newest(event, layer_indices, number)
            # Omitted positions mean that no query is missing, which is cheaper.
            if event.compressed or not event.equal_heads or event.earliest < number:
                parts["query_positions"] = positions
        features = self._from_files | self._sums(event, layer_indices, occupied, columns, width)
        collected = (
            self._of_prompts(event, layer_indices, width)
            if event.ends_prompt
            else self._of_newest(event, layer_indices)
        )
        return {**parts, "features": features | collected}

    def _sums(
        self, event: EvictionEvent, layer_indices: range, occupied: OccupiedPages, columns: EntryColumns, width: int
    ) -> dict[Feature[Any], Any]:
        """Return the window sums, read from the columns; zero where there is no entry.

        Args:
            event: the event.
            layer_indices: indices of the layers in the group.
            occupied: the sub-pages of the entries.
            columns: has the sums.
            width: entries per head in the result.
        """
        if not self._recording.sums:
            return {}
        slots = columns.slots(occupied.subpages)[..., :width]
        exists = torch.arange(width, device=slots.device) < (occupied.entries - event.newer)[..., None]
        sums: dict[Feature[Any], Any] = {}
        for feature in self._recording.sums:
            received = columns.read(feature.column, slots)
            by_layer = received.unflatten(0, (len(layer_indices), -1))
            for row, record in enumerate(event.records):
                if record.own:
                    column = columns.private(record.slot, feature.column, width)
                    by_layer[:, row] = column[layer_indices.start : layer_indices.stop, :, :width]
            received = received.where(exists.view(*exists.shape, *[1] * (received.dim() - exists.dim())), 0)
            sums[feature] = WindowSums(received, self._recording.window(feature, event.ends_prompt))
        return sums

    def _of_prompts(self, event: EvictionEvent, layer_indices: range, width: int) -> dict[Feature[Any], Any]:
        """Return the features that were collected over whole prompts.

        Args:
            event: the event.
            layer_indices: indices of the layers in the group.
            width: entries per head in the result.
        """
        prompts = [
            record.chunks[layer_index] for layer_index in layer_indices for record in event.records if record.chunks
        ]
        return prompts[0].merged_with(prompts[1:]).values(event.at.repeat(len(layer_indices)), width) if prompts else {}

    def _of_newest(self, event: EvictionEvent, layer_indices: range) -> dict[Feature[Any], Any]:
        """Return what an event after the prompt sees of the newest queries; moments of few are computed from these now.

        Args:
            event: the event.
            layer_indices: indices of the layers in the group.
        """
        features, reference = [feature for feature in self._needs.of(QueryMoments) if feature.buffer], None
        if not len(event.slots):  # all was chosen when the turn ended
            features = []
        if len(event.slots) or event.queries is not None:
            reference = self._recording.reference
        if not features and reference is None:
            return {}
        source = self._query_source(layer_indices, slice(0))
        assert source is not None
        values: dict[Feature[Any], Any] = {}
        for feature in features:
            if feature in self._recording.moments:
                moments = self._ring.moments(feature, layer_indices, event.slots)
            else:
                queries, positions = self.newest(event, layer_indices, self._recording.window(feature))
                moments = Moments()
                feature.add(moments, Chunk(queries, list, positions, None, self.softmax.without_sinks, source=source))
            values[feature] = feature.distribution(moments, source, event.at.repeat(len(layer_indices)))
        if reference is not None:
            queries, positions = self.newest(event, layer_indices, reference.later)
            values[reference] = reference.of_newest(queries, positions, source, event.at.repeat(len(layer_indices)))
        return values

    def newest(
        self, event: EvictionEvent, layer_indices: range, size: int
    ) -> tuple[Queries, Int[Tensor, "layers_rows n"]]:
        """Return the newest `size` queries before an event, and their positions.

        Args:
            event: the event.
            layer_indices: indices of the layers in the group.
            size: the number of queries per request.

        Returns:
            The queries, and the position of each; below 0 where no query is recorded.
        """
        positions = event.at[:, None] + torch.arange(-size, 0, device=event.at.device)
        if event.queries is None:
            queries = self._ring.newest(layer_indices, event.slots, positions)
        else:
            queries = event.queries[layer_indices.start : layer_indices.stop, :, -size:].to(positions.device)
        if event.first_query:
            positions = positions.masked_fill(positions < event.first_query, -1)
        return queries, positions.repeat(len(layer_indices), 1)

    def _query_source(self, layer_indices: range, tokens: slice) -> _QuerySource | None:
        """Return how these layers make and rotate the queries of these tokens; None if no feature needs it.

        Args:
            layer_indices: indices of the layers in the group.
            tokens: the tokens, by their indices in the step.
        """
        if self._rotary is None:
            return None
        return _QuerySource(self._rotary, self._projections[layer_indices.start : layer_indices.stop], tokens)

    def check(self, layer_index: int, queries: Queries, hidden: HiddenStates) -> None:
        """Compare a layer's queries before rotation with those computed from its hidden states, once for each layer.

        Args:
            layer_index: index of the layer in the group.
            queries: its queries before rotation.
            hidden: the hidden states of the same tokens.

        Raises:
            UnsupportedModelError: the model makes its queries in a way that keepset does not know.
        """
        if layer_index in self._checked:
            return
        if not matches_unrotated(queries, self._projections[layer_index].queries(hidden).float(), hidden.dtype):
            raise UnsupportedModelError(
                "This model makes queries of hidden states in a way that keepset does not know under vLLM: choose "
                "a method that does not look at hidden states, such as snapkv."
            )
        self._checked.add(layer_index)


@dataclass(frozen=True)
class _QuerySource(QuerySource):
    """How layers make and rotate queries.

    Attributes:
        rotary: rotation of the model.
        projections: one for each row of a batch, if the recipe looks at hidden states.
        tokens: which tokens of the step belong to the chunk; a chunk is of one layer.
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
        return self.rotary.undo(queries, positions.clamp(min=0))  # queries before the first token do not count

    def ahead(self, lengths: Int[Tensor, " batch"], future: int) -> Turn:
        return lambda rows: self.rotary.rotate_ahead(rows, lengths, future)

    def queries(self, hidden: HiddenStates, lengths: Int[Tensor, " batch"], future: int) -> Queries:
        parts, first = [], 0
        for projection, rows in groupby(self.projections):
            number = sum(1 for _ in rows)
            parts.append(projection.queries(hidden[first : first + number]))
            first += number
        return self.rotary.rotate_ahead(torch.cat(parts).float(), lengths, future)

    def merged_with(self, sources: Sequence[_QuerySource]) -> _QuerySource:
        return replace(self, projections=[projection for part in (self, *sources) for projection in part.projections])
