"""One step of a group of layers: what the engine has scheduled (`StepBatch`), and what the layers do (`StepPlan`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any, overload

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from keepset.kernels.page_layout import PagedTokens, PageGroup, PageLayout
from keepset.paged.eviction import EvictionEvent, EvictionSchedule
from keepset.paged.query_records import LayerOperation, QueryAddition


@dataclass(frozen=True)
class ScheduledRequest:
    """One request in one step.

    Attributes:
        row: its row of the batch.
        first_query, end_query: the range of its tokens among the step's queries, the end exclusive.
        prompt: tokens of its prompt.
        before, after: its tokens before and after this step.
        own: when it is compressed, if not by the group's schedule.
    """

    row: int
    first_query: int
    end_query: int
    prompt: int
    before: int
    after: int
    own: EvictionSchedule | None = None


class RequestRows(Sequence[ScheduledRequest]):
    """The requests of a step as columns of numbers. A request becomes an object when it is asked for.

    Args:
        numbers: the first six fields of `ScheduledRequest`, `[6, requests]`.
        given: the requests themselves, if they are objects already.

    Attributes:
        row, first_query, end_query, prompt, before, after: the columns, `[requests]`.
        given: the requests themselves, if they are objects; only then some may have a schedule of their own.
    """

    def __init__(self, numbers: np.ndarray, requests: Sequence[ScheduledRequest] | None = None) -> None:
        self._numbers, self.given = numbers, requests
        self.row, self.first_query, self.end_query, self.prompt, self.before, self.after = numbers

    @classmethod
    def of(cls, requests: Sequence[ScheduledRequest]) -> RequestRows:
        """Return requests with their columns."""
        if isinstance(requests, RequestRows):
            return requests
        numbers = np.array([astuple(request)[:6] for request in requests], dtype=np.int64)
        return cls(numbers.reshape(-1, 6).T, requests)

    def __len__(self) -> int:
        return len(self.row)

    def with_own(self) -> list[int]:
        """Return which of the requests are not compressed by the group's schedule, by their index."""
        assert self.given is not None
        return [index for index, request in enumerate(self.given) if request.own is not None]

    @overload
    def __getitem__(self, index: int) -> ScheduledRequest: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ScheduledRequest]: ...

    def __getitem__(self, index: int | slice) -> ScheduledRequest | Sequence[ScheduledRequest]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if self.given is not None:
            return self.given[index]
        return ScheduledRequest(*self._numbers[:, index].tolist())


@dataclass(frozen=True)
class StepBatch:
    """One step of layers that share block tables, as the engine sees it, without compression.

    Attributes:
        requests: the requests that run, in the order of their rows, which come first; none in a dummy run.
        block_table: blocks by logical position; entries of blocks that the scheduler has freed are arbitrary.
        seq_lens: tokens of each request after this step.
        slot_mapping: `block * block_size + offset` of each new token; the layers write by this very tensor.
        query_start_loc: the first query of each row, and the end of the last row's.
        max_query_len: the most queries of any request.
    """

    requests: Sequence[ScheduledRequest]
    block_table: Int[Tensor, "rows width"]
    seq_lens: Int[Tensor, " rows"]
    slot_mapping: Int[Tensor, " tokens"]
    query_start_loc: Int[Tensor, " rows_plus_1"]
    max_query_len: int

    @cached_property
    def rows(self) -> RequestRows:
        """The requests with their columns."""
        return RequestRows.of(self.requests)

    def tensor(self, values: Sequence[Any] | np.ndarray) -> Tensor:
        """Return integers on the batch's device; a GPU copies them out of pinned memory, without a host sync."""
        on_host, device = torch.tensor(values, dtype=torch.int64), self.block_table.device
        return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)


@dataclass(frozen=True)
class ShiftedBatch:
    """The batch that attention gets instead of the engine's: the same requests without the dropped entries.

    Attributes:
        block_table, seq_lens: blocks and lengths of what is kept. They have the same addresses in every step, because
            captured graphs read them there.
        max_seq_len: the greatest of the lengths; None in a dummy run.
        dropped: entries that each row has lost.
    """

    block_table: Int[Tensor, "rows width"]
    seq_lens: Int[Tensor, " rows"]
    max_seq_len: int | None
    dropped: np.ndarray


@dataclass
class RaggedStep:
    """The layout of heads of different lengths in one step.

    Attributes:
        pages: the page that holds each request's newest token.
        lengths: tokens of each request after this step.
        layout: determines the heads' pages.
        block_size: tokens per page.
        group: the layers.
        tokens: the tokens that are written and attended to by the layout: those of compressed requests or, if each
            request has one token, all. None if nothing was compressed yet: then the engine's own tables are right.
        others: whether there are other tokens, for which the engine's own tables are right.
        tables: the sub-pages of each of these tokens' heads, computed when first needed.
    """

    pages: Int[Tensor, " rows"]
    lengths: Int[Tensor, " rows"]
    layout: PageLayout
    block_size: int
    group: PageGroup
    tokens: PagedTokens | None
    others: bool
    tables: Int[Tensor, "n layers kv_heads pages"] | None = None

    def of_layer(self, layer_index: int) -> PageLayout:
        """Return the layout of one layer, given by its place in the group."""
        return PageLayout(*(part[:, layer_index : layer_index + 1] for part in self.layout))


@dataclass
class StepPlan:
    """The work of a group's layers in one step and after it, the same for all layers.

    The work is done in this order, each list from its first operation to its last:

    1. before the layers run, the engine's tensors are altered (`slot_mapping`, `shifted`, `ragged`);
    2. `in_layers`: each layer does this right after its own attention;
    3. `before_events`: after all layers have attended, and before anything else runs;
    4. `events`: the compressions that are due after the step;
    5. `after_events`: operations on tokens that came after the events.

    3 to 5 run when the next step is planned (`EventQueue`).

    Attributes:
        slot_mapping: the batch's slot mapping, altered in place: slots follow the requests' kept entries.
        shifted: what attention gets instead of the batch, if all heads keep equally many entries.
        ragged: the tokens that are written and attended to head by head, if heads keep different numbers.
        dummy: whether this is a step without requests, which a graph may capture to replay it in later steps.
        recorded: whether the layers were called for `in_layers`.
    """

    slot_mapping: Int[Tensor, " tokens"]
    shifted: ShiftedBatch | None = None
    ragged: RaggedStep | None = None
    in_layers: list[LayerOperation] = field(default_factory=list)
    before_events: list[LayerOperation] = field(default_factory=list)
    events: list[EvictionEvent] = field(default_factory=list)
    after_events: list[LayerOperation] = field(default_factory=list)
    dummy: bool = False
    recorded: bool = False

    @property
    def has_plain(self) -> bool:
        """True if some tokens are written and attended to by one table for all heads, as the engine does."""
        return self.ragged is None or self.ragged.others

    @property
    def reads_entries(self) -> bool:
        """True if an operation looks at entries, so that their pages must be known."""
        return any(isinstance(operation, QueryAddition) for operation in (*self.in_layers, *self.before_events))
