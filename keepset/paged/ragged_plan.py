"""Heads that keep different numbers of entries, so that where each has its pages follows from counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial

from keepset.kernels.page_layout import PageLayout
from keepset.kernels.paged_arguments import EntriesInPages, PagedTokens
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.page_tables import FreedBlocks, PagesOfLayers, PerHeadTables
from keepset.paged.recording_plan import CapturePlanner
from keepset.paged.step import ScheduledRequest, ShiftedBatch, StepBatch, StepPlan, in_blocks

_NOWHERE = -1
"""A slot that nothing is written to: engines fill their steps up with it."""


class RaggedPlanner:
    """Tables, slots and events of a step."""

    def __init__(
        self,
        schedule: EvictionSchedule,
        tables: PerHeadTables,
        freed_blocks: FreedBlocks,
        capture: CapturePlanner,
        replays: bool,
    ) -> None:
        self._schedule, self._tables, self._freed_blocks, self._capture = schedule, tables, freed_blocks, capture
        self._replays = replays

    def begin(self, page: int, layout: PageLayout) -> None:
        """A request has this layout, and its newest token in this page."""
        self._tables.file(page, layout)

    def export_request(self, blocks: Sequence[int], length: int) -> PagesOfLayers:
        """Where the entries of a request lie that has ended, and whose blocks these still are."""
        return self._tables.export_request(blocks, length)

    def plan(self, batch: StepBatch, plan: StepPlan) -> None:
        """Adds to the step's plan the heads' tables and what is compressed."""
        requests, kv_heads = batch.requests, self._schedule.kv_heads
        if not requests:
            if self._replays and batch.max_query_len == 1:
                filled, width = batch.block_table.shape
                plan.ragged = self._tables.captured(self._each_row(batch, filled, width * self._schedule.block_size))
            return
        compressed, groups = [], defaultdict[tuple[EvictionSchedule, int, bool, bool], list[ScheduledRequest]](list)
        for request in requests:
            schedule, prompt = request.own or self._schedule, request.prompt
            before = request.after_context or schedule.was_compressed(prompt, request.before)
            compressed.append(before)
            if at := schedule.due(prompt, request.before, request.after):
                groups[schedule, request.after - at, at == prompt, before].append(request)
        tokens, others = self._tokens(batch, compressed)
        known = [(request.before, request.after, int(must)) for request, must in zip(requests, compressed, strict=True)]
        lengths = batch.tensor(list(zip(*known, strict=True)))
        table = batch.block_table[: len(requests)]
        step = self._tables.advance(table, lengths[0], lengths[1], lengths[2], bool(groups), tokens, others, plan.adds)
        if step is not None and step.tokens is not None:
            plan.ragged = step
            if others:
                self._hide(batch, plan, step.tokens, compressed)
        batches = (
            (key, some)
            for key, members in groups.items()
            for some in in_blocks(key[0].recipe, members, [request.after for request in members], kv_heads)
        )
        for (schedule, newer, _, before), members in batches:
            rows, first, keep = batch.tensor([request.row for request in members]), None, None
            if schedule.fixed:
                first = batch.tensor([schedule.freed(request.prompt, request.after) for request in members])
                gone = [schedule.dropped(request.prompt, request.after) for request in members]
                keep = [request.after - newer - lost for request, lost in zip(members, gone, strict=True)]
            elif step is not None:
                self._freed_blocks.add(self._tables, step.pages[rows])
            longest = max(request.after for request in members)
            pages = self._tables.of_event(rows, batch.block_table[rows], longest, first)
            event = self._capture.event(schedule.recipe, batch, members, newer, keep, before, pages)
            plan.events.append(event)

    def entries(self, batch: StepBatch, requests: Sequence[ScheduledRequest]) -> Callable[[], EntriesInPages]:
        """Where the layers have the entries of these requests before the step's events; known once it is planned."""
        rows, longest = batch.tensor([request.row for request in requests]), max(one.after for one in requests)
        # The engine's table may change before it is asked: what there is of it now is right.
        return cache(partial(self._tables.entries, rows, batch.block_table[rows], longest))

    def _tokens(self, batch: StepBatch, compressed: list[bool]) -> tuple[PagedTokens | None, bool]:
        """The tokens that heads' own pages are of, and whether there are others."""
        requests = batch.requests
        longest = max(request.after for request in requests)
        single = all(request.end_query - request.first_query == 1 for request in requests)
        if single and (self._replays or any(compressed)):
            return self._each_row(batch, len(requests), longest), False
        if not any(compressed):
            return None, True
        several = [
            (request.first_query + i, request.row, request.before + i + 1)
            for request, before in zip(requests, compressed, strict=True)
            for i in range(request.end_query - request.first_query if before else 0)
        ]
        places, rows, lengths = batch.tensor(list(zip(*several, strict=True))).unbind()
        return PagedTokens(batch.block_table, lengths, longest, places, rows), not all(compressed)

    def _each_row(self, batch: StepBatch, rows: int, longest: int) -> PagedTokens:
        """One token of each of these rows."""
        return PagedTokens(batch.block_table, batch.seq_lens[:rows], longest, slots=batch.slot_mapping[:rows])

    def _hide(self, batch: StepBatch, plan: StepPlan, tokens: PagedTokens, compressed: list[bool]) -> None:
        """Lets the engine write nothing of these tokens, and attend to little where it cannot leave them out."""
        assert tokens.places is not None
        batch.slot_mapping.index_fill_(0, tokens.places, _NOWHERE)
        dropped = [0] * batch.block_table.shape[0]
        for request, before in zip(batch.requests, compressed, strict=True):
            dropped[request.row] = request.before if before else 0
        lost = batch.tensor(dropped)
        plan.shifted = ShiftedBatch(
            block_table=batch.block_table,
            seq_lens=batch.seq_lens - lost.to(batch.seq_lens),
            max_seq_len=max(request.after - dropped[request.row] for request in batch.requests),
            dropped=dropped,
        )
