"""`LayerGroup`: the layers that share block tables, with their state and their work while they attend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.rope import RotaryTable
from keepset.core.statistics import HeadShare
from keepset.kernels.packed import BIAS
from keepset.kernels.page_format import PageFormat, encode_layers
from keepset.kernels.softmax import Softmax
from keepset.paged.engine import QueryProjection
from keepset.paged.entry_columns import EntryColumns, columns_of
from keepset.paged.observer import Observer
from keepset.paged.pages import PagedEntries, Pages
from keepset.paged.planner import Planner
from keepset.paged.query_records import (
    AcceptedQueries,
    DraftedQueries,
    EndedQueries,
    HeldQueries,
    LateCapture,
    LayerOperation,
    PromptChunk,
    QueryAddition,
    QueryCapture,
)
from keepset.paged.ragged_heads import RaggedHeadTables
from keepset.paged.step import StepPlan
from keepset.recording import QueryRing

CountEviction = Callable[..., None]
"""Counts compressions. It takes by keyword `events` (requests; 0 where the first layer is not among them),
`entries_kept`, `entries_dropped`, and `seconds`."""


class LayerGroup:
    """The layers that share block tables: their caches, columns and recorders, and what a step's plan does in them.

    Numbers of an entry besides key and value (its original position, and whatever the method remembers of it) are in
    columns that are indexed by the same slots. So all of them move, and are forgotten, together.

    Args:
        planner: the group's planner.
        pages: returns the cache of each layer, layer by layer.
        ring: where the layers record queries, with as many slots as the planner gives away.
        softmax: how the layers make attention of query-key products; its sinks are `[layers, query_heads]`.
        rotary: the model's rotation, where the recipe looks at queries before it.
        projections: those of the layers, if the recipe looks at hidden states.
        count: is called with every compression; with several ranks, on one of them.
        tape: where layers leave their queries while a graph captures them, for steps that replay it.
        columns: the numbers of entries beside key and value, as `columns_of` returns them; None for the recipe's alone.
        share: which of the model's heads this process has; None: all of them.

    Attributes:
        layers: the indices of the group's layers in the model.
        all_layers: the indices of all layers of the model that are compressed.
        recipe: the recipe of the group's schedule.
        kv_heads, block_size: KV heads of a layer in this process, and tokens per page.
        observer: collects what events look at besides entries.
        ended_queries: for each turn that has ended, by its newest page, the queries to which its entries are fitted
            once its next one begins.
    """

    def __init__(
        self,
        planner: Planner,
        pages: Sequence[Callable[[], Pages]],
        ring: QueryRing,
        softmax: Softmax,
        rotary: RotaryTable | None = None,
        projections: Sequence[QueryProjection] = (),
        count: CountEviction | None = None,
        tape: Float[Tensor, "layers tokens query_heads head_dim"] | None = None,
        columns: Mapping[str, tuple[int, ...]] | None = None,
        share: HeadShare | None = None,
    ) -> None:
        schedule = planner.schedule
        self.planner, self.layers, self.recipe = planner, planner.layers, schedule.recipe
        self.all_layers, self.kv_heads, self.block_size = schedule.layers, schedule.kv_heads, schedule.block_size
        self.ring, self.count = ring, count
        self._pages, self._tape = pages, tape
        self._columns = columns_of(self.recipe, planner.recording.group) if columns is None else columns
        needs = self.recipe.method.traits.needs
        self.observer = Observer(needs, planner.recording, ring, softmax, rotary, projections, share)
        self.ended_queries: dict[int, EndedQueries] = {}

    def pages_of(self, layer_index: int) -> Pages:
        """Return the cache of the layer at this place of the group."""
        return self._pages[layer_index]()

    def formats(self, layer_indices: range) -> list[PageFormat]:
        """Return how the caches of some layers are read and written; an empty list if they are not quantised."""
        return [
            page_format
            for layer_index in layer_indices
            if (page_format := self.pages_of(layer_index).format) is not None
        ]

    @cached_property
    def columns(self) -> EntryColumns:
        """The numbers of entries, once there is a cache."""
        pages = self.pages_of(0)
        # A graph (CPUs have none) still runs as it was captured, before the first context with biases was loaded.
        biased = self.recipe.method.traits.biased or pages.device.type != "cpu"
        shape = len(self.layers), self.kv_heads, pages.slots, self.block_size
        return EntryColumns(self._columns, *shape, pages.device, biased)

    def record(
        self, layer_indices: range, plan: StepPlan, queries: Float[Tensor, "layers n query_heads head_dim"]
    ) -> None:
        """Run the plan's operations on the queries of some layers, which have attended.

        Args:
            layer_indices: the layers, by their places in the group.
            plan: the plan of the step.
            queries: the step's queries of these layers, after rotation.
        """
        plan.recorded = True
        for operation in plan.in_layers:
            self._execute(operation, layer_indices, queries)

    def record_replayed(self, plan: StepPlan) -> None:
        """Run the plan's operations on the tape's queries of all layers, after a step that replayed a graph.

        Raises:
            RuntimeError: no graph has left their queries on the tape.
        """
        if plan.in_layers and not plan.recorded:
            if self._tape is None:
                raise RuntimeError("keepset lost the queries of a step, in which the engine called no layer.")
            self.record(range(len(self.layers)), plan, self._tape)

    def run(self, operations: Sequence[LayerOperation]) -> None:
        """Run operations between two steps, in all layers."""
        for operation in operations:
            self._execute(operation, range(len(self.layers)), None)

    def _execute(
        self,
        operation: LayerOperation,
        layer_indices: range,
        queries: Float[Tensor, "layers n query_heads head_dim"] | None,
    ) -> None:
        """Execute an operation in some layers.

        Args:
            operation: the operation.
            layer_indices: the layers, by their places in the group.
            queries: the step's queries of these layers, after rotation; None between steps.
        """
        if isinstance(operation, QueryAddition):
            pages = [self.pages_of(layer_index) for layer_index in layer_indices]
            self.observer.add_up(layer_indices, operation, queries, pages, self.columns)
        elif isinstance(operation, AcceptedQueries):
            capture = operation.capture
            for layer_index in layer_indices:
                accepted = operation.drafted.copies[layer_index][capture.queries]
                self.ring.record(range(layer_index, layer_index + 1), accepted[None], capture.slots, capture.places)
        elif queries is None:
            assert isinstance(operation, LateCapture)
            for copied, late in operation.copies:
                self.ring.record(copied, late, operation.capture.slots, operation.capture.places)
            operation.copies.clear()
        else:
            self._take(operation, layer_indices, queries)

    def _take(
        self,
        operation: PromptChunk | HeldQueries | QueryCapture | DraftedQueries | LateCapture,
        layer_indices: range,
        queries: Float[Tensor, "layers n query_heads head_dim"],
    ) -> None:
        """Collect, hold, record or copy queries of the step that is under way.

        Args:
            operation: what is done with the queries.
            layer_indices: indices of the layers in the group.
            queries: the step's queries of these layers, after rotation.
        """
        if isinstance(operation, QueryCapture):
            self.ring.record(layer_indices, queries[:, operation.queries], operation.slots, operation.places)
        elif isinstance(operation, DraftedQueries):
            operation.copies.update(zip(layer_indices, queries[:, operation.queries], strict=True))
        elif isinstance(operation, LateCapture):
            operation.copies.append((layer_indices, queries[:, operation.capture.queries]))
        elif isinstance(operation, HeldQueries):
            for layer_index, of_layer in zip(layer_indices, queries, strict=True):
                self.ring.hold(layer_index, operation.slot, of_layer[operation.first_query : operation.end_query])
        else:
            for layer_index, of_layer in zip(layer_indices, queries, strict=True):
                self.observer.collect(layer_index, operation, of_layer, self.pages_of(layer_index))

    @property
    def ended_shape(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """The type and the shape of an ended turn's queries."""
        reference = self.planner.recording.reference
        return self.ring.dtype, (len(self.layers), *self.ring.of_request(reference.later if reference else 0))

    @property
    def holds_int8(self) -> bool:
        """Whether pages hold keys and values as 8-bit integers, each with a scale of its own."""
        format = self.pages_of(0).format
        return format is not None and format.numbers == torch.int8

    def write_context(self, columns: Mapping[str, Tensor], layers: Int[Tensor, " n"], slots: Int[Tensor, " n"]) -> None:
        """Write entries of a context into the pages, once all events that are due are over.

        Args:
            columns: `keys`, `values`, `positions` and what the method remembers, `[n, ...]`. Keys and values may be
                8-bit integers, with `key_scale` and `value_scale`, if the pages hold such (`holds_int8`).
            layers: the layer of each entry, by its place in the group.
            slots: the slot of each entry; numbers continue into the caches of the next layers.
        """
        pages, keys, values = self.pages_of(0), columns["keys"], columns["values"]
        slots = (layers * pages.slots + slots) % (len(self.layers) * pages.slots)
        if formats := self.formats(range(len(self.layers))):
            if keys.dtype == torch.int8:
                scales = columns["key_scale"], columns["value_scale"]
                keys, values = (formats[0].join(*part) for part in zip((keys, values), scales, strict=True))
            else:
                keys, values = (encode_layers(formats, part, layers, part is values) for part in (keys, values))
        pages.write(keys, values, slots)
        self.columns.write_positions(slots, columns["positions"])
        for name in self._state_columns:
            if name in columns:
                self.columns.write(name, slots, columns[name])
        if BIAS not in columns:
            self.columns.write_no_bias(slots)

    def export_request(self, blocks: Sequence[int], length: int) -> dict[int, dict[str, Tensor]]:
        """Return the entries that an ended request left in its blocks, once all due events are over.

        Args:
            blocks: the blocks of the request, by logical position.
            length: tokens of the request.

        Returns:
            For every layer, by its index in the model, columns packed head after head, and the heads' `counts`.

        Raises:
            RuntimeError: the place of its entries is not known any more.
        """
        assert isinstance(self.planner.tables, RaggedHeadTables)
        layers, pages = {}, self.planner.tables.export_request(blocks, length)
        for layer_index, layer in enumerate(self.layers):
            occupied = pages.occupied(range(layer_index, layer_index + 1))
            paged = PagedEntries(self.pages_of(0), occupied.subpages, self.formats(range(layer_index, layer_index + 1)))
            keys, values = paged.keys(slice(None))[0], paged.values(slice(None))[0]
            lengths = occupied.entries.new_tensor([length])
            index = torch.arange(keys.shape[1], device=keys.device)
            exists = index < occupied.entries[0, :, None]
            positions = self.columns.positions(occupied, lengths)[0].int()
            columns = {"keys": keys[exists], "values": values[exists], "positions": positions[exists]}
            slots, packed = self.columns.slots(occupied.subpages), index < occupied.packed[0, :, None]
            for name in self._state_columns:
                columns[name] = self.columns.read(name, slots)[0].where(packed, 0)[exists]
            layers[layer] = {name: column.cpu() for name, column in columns.items()}
            layers[layer]["counts"] = occupied.entries[0].long().cpu()
        return layers

    @property
    def _state_columns(self) -> list[str]:
        """The names of the columns with what the method remembers of entries, and with biases."""
        names = dict.fromkeys((*self.recipe.method.traits.state_names, BIAS))
        return [name for name in names if name in self.columns]
