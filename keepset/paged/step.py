"""What a step is: what an engine has scheduled (`StepBatch`), and what its layers do in it (`StepPlan`). Plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.accumulators import Accumulators
from keepset.core.keep_set import LayerKeepSet
from keepset.kernels.paged_arguments import EntriesInPages
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.page_tables import EventPages, RaggedStep
from keepset.paged.query_records import QueryRecord
from keepset.recipe import Recipe

_OF_A_HEAD, OF_ALL = 1 << 17, 1 << 20
"""Entries that an event looks at together, if not of one request in one layer: of a head, and of all."""


@dataclass(frozen=True)
class ScheduledRequest:
    """One request in one step.

    Attributes:
        row: its row of the batch.
        first_query, end_query: its tokens among the step's queries, the latter exclusive.
        prompt: tokens of its prompt.
        before, after: tokens that it has had before and after this step.
        after_context: whether it began with a context out of a file.
        own: when it is compressed, where that is not the group's.
    """

    row: int
    first_query: int
    end_query: int
    prompt: int
    before: int
    after: int
    after_context: bool = False
    own: EvictionSchedule | None = None


@dataclass(frozen=True)
class StepBatch:
    """One step of a group of layers that share block tables, as the engine sees it: nothing was ever compressed.

    Attributes:
        requests: those that run, in the order of their rows, which are the first; none in a dummy run.
        block_table: blocks by logical position; of blocks that the scheduler has freed, anything.
        seq_lens: tokens of each request after this step.
        slot_mapping: `block * block_size + offset` of each new token; the layers write by this very tensor.
        starts: the first query of each row, and the end of the last one's.
        query_start_loc: the same on the CPU.
        max_query_len: most queries of any request.
    """

    requests: Sequence[ScheduledRequest]
    block_table: Int[Tensor, "rows width"]
    seq_lens: Int[Tensor, " rows"]
    slot_mapping: Int[Tensor, " tokens"]
    starts: Int[Tensor, " rows_plus_1"]
    query_start_loc: Int[Tensor, " rows_plus_1"]
    max_query_len: int

    def tensor(self, values: Sequence[Any]) -> Tensor:
        """Whole numbers on the batch's device."""
        return self.upload(torch.tensor(values, dtype=torch.int64))

    def upload(self, values: Tensor) -> Tensor:
        """A tensor of the host on the batch's device; a GPU copies what is pinned without being waited for."""
        device = self.block_table.device
        return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


@dataclass(frozen=True)
class QueryCapture:
    """Queries to record: some of a step's, and the slots and places in the rings where they go."""

    queries: Int[Tensor, " n"]
    slots: Int[Tensor, " n"]
    places: Int[Tensor, " n"]


@dataclass(frozen=True)
class HeldQueries:
    """A step's queries that a slot holds in whole until the request's next step."""

    slot: int
    first_query: int
    end_query: int


@dataclass(frozen=True)
class QueryAddition:
    """Queries of some requests that are added up for an event to come.

    Attributes:
        slots: the requests'; their queries are in the rings, if nothing else is said.
        positions: of the queries.
        begins: position of the first query of each request that counts here, for a window of any length.
        points, ends_prompt: tokens at the event, and whether these are prompts' ends.
        lengths: tokens of each request.
        unwritten: newest entries of each head that have no number yet.
        owners: slots and tokens of requests whose sums are their own (`OwnSums`), None of others; empty where all are.
        entries: says where the layers have the entries, once the step is planned.
        held: slot of the one request whose queries are held in whole.
        first_query: of the one request whose queries are this step's.
    """

    slots: Int[Tensor, " rows"]
    positions: Int[Tensor, "rows n"]
    begins: Int[Tensor, " rows"]
    points: Int[Tensor, " rows"]
    ends_prompt: bool
    lengths: Int[Tensor, " rows"]
    unwritten: Int[Tensor, " rows"]
    owners: Sequence[tuple[int, int] | None]
    entries: Callable[[], EntriesInPages]
    held: int | None = None
    first_query: int | None = None


@dataclass(frozen=True)
class EvictionEvent:
    """The compression of some requests by one recipe; where heads are equal these hold equally many entries.

    Entries that came after the event's point in the same step (a prompt that is computed again after a preemption
    ends anywhere) are not looked at and stay.

    Attributes:
        recipe: theirs.
        rows: their rows of the batch.
        at: tokens that each request has had at the event's point.
        earliest, latest: the least and the most of them.
        prompts: tokens of each request's prompt.
        newer: entries after that point.
        keep: entries that the average head of each request must be left with; None where the data decide.
        compressed: whether these requests were compressed before.
        ends_prompt: whether the point is the prompt's end.
        equal_heads: whether all heads have equally many entries.
        pages: theirs, of entries before and after.
        records: of the requests, where the recipe looks at queries or at the whole prompt; else none.
        slots: theirs in what layers hold of queries.
    """

    recipe: Recipe
    rows: Sequence[int]
    at: Int[Tensor, " rows"]
    earliest: int
    latest: int
    prompts: Int[Tensor, " rows"]
    newer: int
    keep: Sequence[int] | None
    compressed: bool
    ends_prompt: bool
    equal_heads: bool
    pages: EventPages
    records: Sequence[QueryRecord]
    slots: Int[Tensor, " recorded"]

    def is_counted(self, kept: LayerKeepSet) -> bool:
        """Whether a layer keeps as many entries as the scheduler counts with."""
        if self.keep is None:
            return True
        sizes, heads = kept.heads.host_values, kept.counts.shape[1]
        of_rows = [sizes[first : first + heads] for first in range(0, len(sizes), heads)]
        rows = zip(of_rows, cycle(self.keep), strict=False)  # layer after layer
        if self.equal_heads:
            return all(set(own) == {keep} for own, keep in rows)
        return all(sum(own) <= keep * heads for own, keep in rows)


def max_layers_per_event(recipe: Recipe, entries: int, kv_heads: int) -> int:
    """How many layers of a request, or requests, with so many entries in each head an event looks at together."""
    numbers = entries * recipe.method.memory_factor
    return max(1, min(_OF_A_HEAD // numbers, OF_ALL // (numbers * kv_heads)))


def in_blocks(
    recipe: Recipe, requests: Sequence[ScheduledRequest], entries: Sequence[int], kv_heads: int
) -> Iterator[list[ScheduledRequest]]:
    """Requests that are compressed together, the longest first: all are looked at as if they were as long as that.

    So none joins others of more than twice its entries, of which each has so many in a head.
    """
    waiting = sorted(zip(entries, requests, strict=True), key=lambda one: -one[0])
    while waiting:
        longest = waiting[0][0]
        some = [one for held, one in waiting[: max_layers_per_event(recipe, longest, kv_heads)] if 2 * held >= longest]
        yield some
        del waiting[: len(some)]


@dataclass(frozen=True)
class PromptChunk:
    """What this step brings of a prompt, for recipes that look at the whole of it.

    Attributes:
        layers: what each layer of the group was told of the prompt so far.
        first_query, end_query: its tokens among the step's queries.
        position: of the first.
        subpages: that hold the prompt's entries up to the last.
    """

    layers: Sequence[Accumulators]
    first_query: int
    end_query: int
    position: int
    subpages: Int[Tensor, "kv_heads pages"]


@dataclass(frozen=True)
class ShiftedBatch:
    """What attention is told instead, where all heads keep equally many: the same batch less what was dropped.

    Attributes:
        block_table, seq_lens: of what is kept; in every step at the same addresses, which graphs have noted.
        max_seq_len: the greatest of the lengths; None in a dummy run.
        dropped: entries that each row has lost.
    """

    block_table: Int[Tensor, "rows width"]
    seq_lens: Int[Tensor, " rows"]
    max_seq_len: int | None
    dropped: list[int]


@dataclass
class StepPlan:
    """What keepset's layers do in one step, the same for all layers of a group.

    Attributes:
        slot_mapping: the batch's, altered in place to where the requests' entries end.
        shifted: what attention is told instead of the batch, where all heads keep equally many.
        ragged: tokens that are written and attended head by head, where these have different numbers of entries.
        chunks: what there is of prompts that are looked at as a whole.
        added_first, added_now: queries that a layer adds up before it records this step's, and after.
        captured_before, captured_after: queries to record before and after the events.
        added: queries that are added up before the events, once all layers have attended.
        held: queries that follow an event in their own step, and are more than wait.
        events: compressions, once all layers have attended.
        dummy: whether it is nobody's step, which a graph may capture, to replay it in steps to come.
        recorded: whether layers have been called to note what there is to note.
    """

    slot_mapping: Int[Tensor, " tokens"]
    shifted: ShiftedBatch | None = None
    ragged: RaggedStep | None = None
    chunks: list[PromptChunk] = field(default_factory=list)
    added_first: list[QueryAddition] = field(default_factory=list)
    added_now: list[QueryAddition] = field(default_factory=list)
    captured_before: QueryCapture | None = None
    captured_after: QueryCapture | None = None
    added: list[QueryAddition] = field(default_factory=list)
    held: list[HeldQueries] = field(default_factory=list)
    events: list[EvictionEvent] = field(default_factory=list)
    dummy: bool = False
    recorded: bool = False

    @property
    def records(self) -> bool:
        """Whether layers note anything of the step's queries."""
        recorded = self.captured_before or self.captured_after or self.held
        return bool(recorded or self.chunks or self.added_first or self.added_now)

    @property
    def adds(self) -> bool:
        """Whether layers add queries up, for which they look at entries."""
        return bool(self.added_first or self.added_now or self.added)
