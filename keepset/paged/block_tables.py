"""`BlockTables`: where the entries of requests lie in the layers of a group, step by step.

There are two kinds. Heads that keep equally many entries share one block table per request, shifted by what was
dropped: an event packs what stays into the logical slots from block `dropped // block_size` on, and the blocks before
that are free. Heads that keep different numbers have their own pages (`ragged_heads.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from keepset.kernels import page_layout
from keepset.kernels.page_layout import EntriesInPages, PageGroup, PageLayout
from keepset.kernels.paged import shift_step
from keepset.paged.courses import StepCourses
from keepset.paged.eviction import EventPages, EvictionSchedule, OccupiedPages, PageAssignment
from keepset.paged.step import ScheduledRequest, ShiftedBatch, StepBatch, StepPlan


class BlockTables(ABC):
    """Tells where requests' entries lie in the pages of one group of layers: in each step, and at an event."""

    def __init__(self, schedule: EvictionSchedule) -> None:
        self.schedule = schedule

    def schedule_of(self, request: ScheduledRequest) -> EvictionSchedule:
        """Return when a request is compressed."""
        return request.own or self.schedule

    @abstractmethod
    def place_step(self, batch: StepBatch, courses: StepCourses, plan: StepPlan, eventful: bool) -> None:
        """Place a step's tokens: alter the slot mapping, and give attention the entries' blocks.

        Args:
            batch: the step.
            courses: what is known of its requests.
            plan: its plan, to which `shifted` or `ragged` is added.
            eventful: whether an event follows the step.

        Raises:
            RuntimeError: a compressed request is not where it was left.
        """

    @abstractmethod
    def entries(self, batch: StepBatch, requests: Sequence[ScheduledRequest]) -> Callable[[], EntriesInPages]:
        """Return a function that tells where the layers have the entries of requests, before the step's events.

        Args:
            batch: the step.
            requests: some of its requests.

        Returns:
            The function, to be called once the step was placed.
        """

    @abstractmethod
    def event_width(self, request: ScheduledRequest) -> int:
        """Return an upper bound for the entries of each head of a request after the step."""

    @abstractmethod
    def event_key(self, request: ScheduledRequest) -> Hashable:
        """Return the key that two requests must share to share an event, besides recipe and point."""

    @abstractmethod
    def event_pages(self, batch: StepBatch, requests: Sequence[ScheduledRequest]) -> EventPages:
        """Return the pages of the requests of an event, once the step was placed.

        Args:
            batch: the step.
            requests: the requests that are compressed together.
        """


class EqualHeadPages(EventPages):
    """The pages of an event's requests, which are the same in every layer."""

    def __init__(
        self, occupied: OccupiedPages, left: Int[Tensor, "rows kv_heads pages"], width: int, group: PageGroup
    ) -> None:
        self._occupied, self._left, self._width, self._group = occupied, left, width, group

    @property
    def width(self) -> int:
        return self._width

    def held(self, layer_indices: range) -> Sequence[int]:
        rows, kv_heads = self._occupied.entries.shape
        return [self._width * kv_heads] * (rows * len(layer_indices))

    def occupied(self, layer_indices: range) -> OccupiedPages:
        subpages, packed, entries = self._occupied
        counts = (part.repeat(len(layer_indices), 1) for part in (packed, entries))
        return OccupiedPages(self._in_layers(subpages, layer_indices), *counts)

    def assign(self, layer_indices: range, counts: Int[Tensor, "layers_rows kv_heads"]) -> PageAssignment:
        return PageAssignment(None, lambda most: self._in_layers(self._left, layer_indices))

    def _in_layers(
        self, subpages: Int[Tensor, "rows kv_heads pages"], layer_indices: range
    ) -> Int[Tensor, "layers_rows kv_heads pages"]:
        layers = subpages.expand(len(layer_indices), -1, -1, -1)
        group = self._group._replace(places=layer_indices)
        return page_layout.to_group_pages(layers, group, subpages.shape[1]).flatten(0, 1)


class EqualHeadTables(BlockTables):
    """Block tables that are shifted by the dropped entries.

    Attention gets the same two tensors in every step, so CUDA graphs can capture their addresses.
    """

    def __init__(self, schedule: EvictionSchedule, group: PageGroup, max_requests: int) -> None:
        super().__init__(schedule)
        self._group, self._max_requests = group, max_requests
        self._shifted: tuple[Tensor, Tensor] | None = None
        self._dropped: tuple[np.ndarray, Tensor] | None = None

    def place_step(self, batch: StepBatch, courses: StepCourses, plan: StepPlan, eventful: bool) -> None:
        rows, width = batch.block_table.shape
        dropped = np.zeros(rows, dtype=np.int64)
        dropped[batch.rows.row] = courses.dropped
        if self._dropped is None or not np.array_equal(self._dropped[0], dropped):
            self._dropped = dropped, batch.tensor(dropped)
        if self._shifted is None:
            most = max(rows, self._max_requests)
            self._shifted = batch.block_table.new_zeros(most, width), batch.seq_lens.new_zeros(most)
        table, lengths = self._shifted[0][:rows], self._shifted[1][:rows]
        step = batch.block_table, batch.seq_lens, batch.query_start_loc, self._dropped[1], batch.slot_mapping
        shift_step(*step, self.schedule.block_size, table, lengths)
        longest = int((batch.rows.after - courses.dropped).max()) if len(courses.dropped) else None
        plan.shifted = ShiftedBatch(table, lengths, longest, dropped)

    def entries(self, batch: StepBatch, requests: Sequence[ScheduledRequest]) -> Callable[[], EntriesInPages]:
        """Return where the entries lie.

        All heads share their pages, so the layouts have only the number of dropped entries.

        Args:
            batch: the step.
            requests: those of its requests that are asked for, one row of the result each.
        """
        counts = [self._held(request) for request in requests]
        numbers = [
            (request.row, request.after, request.after - width, kept)
            for request, (width, kept) in zip(requests, counts, strict=True)
        ]
        rows, lengths, dropped, kept = batch.tensor(numbers).t().contiguous().unbind()
        packed = kept[:, None, None].expand(-1, 1, self.schedule.kv_heads).contiguous()
        dropped, none = dropped[:, None], torch.zeros_like(packed)
        layout = PageLayout(none, dropped, dropped // self.schedule.block_size, none[..., 0].contiguous())
        longest = max(width for width, _ in counts)
        entries = EntriesInPages(layout, batch.block_table[rows], lengths, packed, longest)
        return lambda: entries

    def event_width(self, request: ScheduledRequest) -> int:
        return self._held(request)[0]

    def event_key(self, request: ScheduledRequest) -> tuple[int, int]:
        """Return the entries of each head before and after the event."""
        schedule = self.schedule_of(request)
        return self.event_width(request), request.after - schedule.dropped(request.prompt, request.after)

    def event_pages(self, batch: StepBatch, requests: Sequence[ScheduledRequest]) -> EqualHeadPages:
        counts, shape = [self._held(request) for request in requests], (len(requests), self.schedule.kv_heads)
        entries, packed = (part[:, None].expand(shape) for part in batch.tensor(counts).unbind(1))
        width, left = self.event_key(requests[0])  # which all share
        occupied = OccupiedPages(self._subpages(batch, requests, width), packed, entries)
        return EqualHeadPages(occupied, self._subpages(batch, requests, left), width, self._group)

    def _held(self, request: ScheduledRequest) -> tuple[int, int]:
        """Return the entries of each head after the step, and how many of them the event before has kept."""
        schedule = self.schedule_of(request)
        width, kept = request.after - schedule.dropped(request.prompt, request.before), 0
        # Events that dropped nothing have packed nothing: everything since the event before them is whole.
        if width < request.after:
            kept = schedule.newest_effective_event(request.prompt, request.before) - (request.after - width)
        return width, kept

    def _subpages(
        self, batch: StepBatch, requests: Sequence[ScheduledRequest], entries: int
    ) -> Int[Tensor, "rows kv_heads pages"]:
        """Return the sub-pages of so many entries of each request: they lie in its blocks from the first not freed.

        Args:
            batch: the step.
            requests: those of its requests that are asked for, one row of the result each.
            entries: the entries per head for which a row has sub-pages.
        """
        size, kv_heads = self.schedule.block_size, self.schedule.kv_heads
        row, first = batch.tensor([(request.row, (request.after - entries) // size) for request in requests]).unbind(1)
        page_index = torch.arange(-(-entries // size), device=row.device)
        columns = (first[:, None] + page_index).clamp(max=batch.block_table.shape[1] - 1)
        heads = torch.arange(kv_heads, device=row.device)[:, None]
        return batch.block_table[row[:, None], columns].long()[:, None] * kv_heads + heads
