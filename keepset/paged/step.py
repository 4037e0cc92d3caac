"""What a step is: what an engine has scheduled (`StepBatch`), and what its layers do in it (`StepPlan`). Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.paged.per_head import PerHeadSequences
from keepset.paged.prompt import Prompts
from keepset.paged.query_windows import QueryCapture, QueryRecord


@dataclass(frozen=True)
class ScheduledRequest:
    """One request in one step.

    Attributes:
        row: its row of the batch.
        first_query, end_query: its tokens among the step's queries, the latter exclusive.
        prompt: tokens of its prompt.
        before, after: tokens that it has had before and after this step.
    """

    row: int
    first_query: int
    end_query: int
    prompt: int
    before: int
    after: int


@dataclass(frozen=True)
class StepBatch:
    """One step of a group of layers that share block tables, as the engine sees it: nothing was ever compressed.

    Attributes:
        requests: those that run, in the order of their rows, which are the first; none in a dummy run.
        block_table: blocks by logical position; of blocks that the scheduler has freed, anything.
        seq_lens: tokens of each request after this step.
        slot_mapping: `block * block_size + offset` of each new token; the layers write by this very tensor.
        query_start_loc: on the CPU; the first query of each row, and the end of the last one's.
        max_query_len: most queries of any request.
    """

    requests: Sequence[ScheduledRequest]
    block_table: Int[Tensor, "rows width"]
    seq_lens: Int[Tensor, " rows"]
    slot_mapping: Int[Tensor, " tokens"]
    query_start_loc: Int[Tensor, " rows_plus_1"]
    max_query_len: int

    def tensor(self, values: Sequence[Any]) -> Tensor:
        """Numbers on the batch's device."""
        return torch.tensor(values, device=self.block_table.device)


class OccupiedPages(NamedTuple):
    """Where the entries of an event's requests lie in one layer.

    Attributes:
        subpages: that hold each head's entries, in their order.
        kept: entries that each head kept at its event before; they are the first.
        entries: entries that each head has.
    """

    subpages: Int[Tensor, "rows kv_heads pages"]
    kept: Int[Tensor, "rows kv_heads"]
    entries: Int[Tensor, "rows kv_heads"]


@runtime_checkable
class EventPages(Protocol):
    """The pages of an event's requests, before and after it."""

    def occupied(self, place: int) -> OccupiedPages:
        """Those that the layer at this place of its group holds."""

    def reassign(self, place: int, counts: Int[Tensor, "rows kv_heads"]) -> Int[Tensor, "rows kv_heads pages"] | None:
        """Those that will hold so many entries of each head; None where they do not fit, and all stays as it is."""


@dataclass(frozen=True)
class RecordedQueries:
    """The newest queries of an event's requests.

    Attributes:
        records: of each request.
        slots: their places in the windows.
        positions: up to the event's point; negative before a text's beginning.
    """

    records: list[QueryRecord]
    slots: Int[Tensor, " rows"]
    positions: Int[Tensor, "rows n"]

    @property
    def short(self) -> bool:
        """Whether they reach back beyond a text's beginning."""
        return bool((self.positions < 0).any())


@dataclass(frozen=True)
class EvictionEvent:
    """The compression of requests that hold equally many entries.

    Entries that came after the event's point in the same step (a prompt that is computed again after a preemption
    ends anywhere) are not looked at and stay.

    Attributes:
        rows: their rows of the batch.
        at: tokens that each request has had at the event's point.
        prompts: tokens of each request's prompt.
        newer: entries after that point.
        width: entries of the head that has most, newer ones included.
        keep: entries that the average head must be left with; None where the data decide.
        compressed: whether these requests were compressed before.
        ends_prompt: whether the point is the prompt's end.
        equal_heads: whether all heads have equally many entries.
        pages: where the entries lie and will lie.
        queries: the newest, where the recipe looks at them or at the whole prompt.
    """

    rows: Int[Tensor, " rows"]
    at: Int[Tensor, " rows"]
    prompts: Int[Tensor, " rows"]
    newer: int
    width: int
    keep: int | None
    compressed: bool
    ends_prompt: bool
    equal_heads: bool
    pages: EventPages
    queries: RecordedQueries | None


@dataclass(frozen=True)
class PromptChunk:
    """What this step brings of a prompt, for recipes that look at the whole of it.

    Attributes:
        prompt: what the request's prompt has told so far.
        first_query, end_query: its tokens among the step's queries.
        position: of the first.
        subpages: that hold the prompt's entries up to the last.
    """

    prompt: Prompts
    first_query: int
    end_query: int
    position: int
    subpages: Int[Tensor, "kv_heads pages"]


@dataclass(frozen=True)
class ShiftedBatch:
    """What attention is told instead, where all heads keep equally many: the same batch less what was dropped.

    Attributes:
        block_table, seq_lens: of what is kept.
        max_seq_len: the greatest of the lengths.
        dropped: entries that each row has lost.
    """

    block_table: Int[Tensor, "rows width"]
    seq_lens: Int[Tensor, " rows"]
    max_seq_len: int
    dropped: list[int]


@dataclass
class StepPlan:
    """What keepset's layers do in one step, the same for all layers of a group.

    Attributes:
        slot_mapping: the batch's, altered in place to where the requests' entries end.
        shifted: what attention is told instead of the batch, where anything was dropped from all heads alike.
        per_head: the same where heads have different numbers of entries: each is a request of its own.
        chunks: what there is of prompts that are looked at as a whole.
        captured_before, captured_after: queries to record before and after the events.
        events: compressions, after the layer's attention.
    """

    slot_mapping: Int[Tensor, " tokens"]
    shifted: ShiftedBatch | None = None
    per_head: PerHeadSequences | None = None
    chunks: list[PromptChunk] = field(default_factory=list)
    captured_before: QueryCapture | None = None
    captured_after: QueryCapture | None = None
    events: list[EvictionEvent] = field(default_factory=list)

    @property
    def eventful(self) -> bool:
        """Whether layers do anything after their attention."""
        return bool(self.chunks or self.events or self.captured_before or self.captured_after)
