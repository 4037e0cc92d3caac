"""`Planner`: from what vLLM schedules for one step to what keepset's attention layers do in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.accumulate import Accumulators
from keepset.errors import KeepsetError
from keepset.paged.freed_blocks import freed_blocks
from keepset.paged.page_tables import RaggedStep, RaggedTables
from keepset.paged.per_head import PerHeadSequences
from keepset.paged.prompt import Prompts, looks_at_all
from keepset.paged.query_windows import Capture, Record, Windows
from keepset.vllm.spec import KeepSpec

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from keepset.paged.layer_barrier import LayerBarrier


@dataclass(frozen=True)
class Row:
    """One request in one step.

    Attributes:
        index: its row of the batch.
        first, last: its tokens among the step's queries.
        prompt: tokens of its prompt.
        before, after: tokens that it has had before and after this step.
    """

    index: int
    first: int
    last: int
    prompt: int
    before: int
    after: int


@dataclass(frozen=True)
class Chunk:
    """What this step brings of a prompt, for recipes that look at the whole of it.

    Attributes:
        prompt: what the request's prompt has told so far.
        first, last: its tokens among the step's queries.
        position: of the first.
        subpages: that hold the prompt's entries up to the last.
    """

    prompt: Prompts
    first: int
    last: int
    position: int
    subpages: Int[Tensor, "kv_heads pages"]


@dataclass(frozen=True)
class Event:
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
        shifted: where the entries lie and will lie, when that is the same for all layers; else
        table, first: blocks by logical position, and the first that the scheduler leaves, where it knows.
        records, slots, window: recorded queries: of each request, their ring, and positions up to the point.
    """

    rows: Int[Tensor, " rows"]
    at: Int[Tensor, " rows"]
    prompts: Int[Tensor, " rows"]
    newer: int
    width: int
    keep: int | None
    compressed: bool
    ends_prompt: bool
    shifted: Shifted | None = None
    table: Int[Tensor, "all_rows width"] | None = None
    first: Int[Tensor, " rows"] | None = None
    records: list[Record] = field(default_factory=list)
    slots: Int[Tensor, " rows"] | None = None
    window: Int[Tensor, "rows n"] | None = None

    @property
    def level(self) -> bool:
        """Whether all heads have equally many entries."""
        return self.shifted is not None

    @property
    def short(self) -> bool:
        """Whether a window reaches back beyond a text's beginning."""
        return self.window is not None and bool((self.window < 0).any())


class Shifted(NamedTuple):
    """Entries of heads that keep equally many, layer for layer in the same places.

    Attributes:
        before, after: sub-pages that hold each head's entries, and those that will.
        counts: entries that each head kept at its event before.
        entries: entries that each head has.
    """

    before: Int[Tensor, "rows kv_heads pages"]
    after: Int[Tensor, "rows kv_heads pages_after"]
    counts: Int[Tensor, "rows kv_heads"]
    entries: Int[Tensor, "rows kv_heads"]


@dataclass
class Step:
    """What keepset's layers do in one step, the same for all layers of a group.

    Attributes:
        planner: who planned it.
        metadata: vLLM's metadata with physical lengths, tables and slots.
        events: compressions, after the layer's attention.
        early, late: queries to record before and after them.
        chunks: what there is of prompts that are looked at as a whole.
        ragged: page tables of single heads, where requests have them.
    """

    planner: Planner
    metadata: CommonAttentionMetadata
    events: list[Event] = field(default_factory=list)
    early: Capture | None = None
    late: Capture | None = None
    chunks: list[Chunk] = field(default_factory=list)
    ragged: RaggedStep | None = None
    _singles: PerHeadSequences | None = None

    def per_head(self) -> PerHeadSequences:
        """Heads as requests, for all layers."""
        if self._singles is None:
            assert self.ragged is not None
            tokens, longest = int(self.metadata.query_start_loc_cpu[-1]), self.metadata.max_query_len
            self._singles = PerHeadSequences(self.ragged, tokens, longest, self.planner.block_size)
        return self._singles


class Planner:
    """Plans the steps of one group of layers.

    Args:
        spec: of the group's cache.
        layers: names and indices in the model of the group's layers.
        model_type: of the model.
        requests: how many can run at once.
        blocks: in the whole pool.
        barrier: of all groups' events, where the recipe looks across layers.
    """

    def __init__(
        self,
        spec: KeepSpec,
        layers: dict[str, int],
        model_type: str,
        requests: int,
        blocks: int,
        barrier: LayerBarrier | None,
    ) -> None:
        self.eviction_schedule, self.block_size, self.kv_heads = (
            spec.eviction_schedule,
            spec.block_size,
            spec.num_kv_heads,
        )
        self.layers, self.all_layers, self.model_type = layers, spec.layers, model_type
        self._blocks, self.barrier = blocks, barrier
        self._places = {name: place for place, name in enumerate(layers)}
        recipe = self.eviction_schedule.recipe
        self.needs = needs = recipe.method.needs
        self._collects = looks_at_all(needs) and recipe.schedule.prefill
        # What the moments of a decode-time event cover is recorded like a window.
        buffer = needs.buffer if recipe.schedule.every is not None else 0
        self.window = max(needs.window, buffer)
        self.windows = Windows(len(layers), max(self.window, 1), requests)
        self.ragged = (
            RaggedTables(len(layers), self.kv_heads, self.block_size) if self.eviction_schedule.ragged else None
        )

    def place(self, layer: str) -> int:
        """A layer's place in the group."""
        return self._places[layer]

    def plan(self, metadata: CommonAttentionMetadata) -> Step:
        """The step that this metadata describes."""
        rows = self._rows(metadata)
        self._device = metadata.block_table_tensor.device
        # The prompts' lengths came in a field of another feature, which is not to see them.
        step = Step(self, metadata.replace(rswa_prefix_lens=None))
        if not rows:
            return step
        if self._records:
            self._capture(rows, step)
        if self.ragged is not None:
            self._plan_ragged(rows, step)
        else:
            self._plan_shifted(rows, step)
        return step

    def _rows(self, metadata: CommonAttentionMetadata) -> list[Row]:
        """The requests of a real step; a dummy run has none."""
        if metadata.rswa_prefix_lens is None:
            raise KeepsetError(
                "This vLLM does not say how long prompts are where keepset looks for it: use a supported version."
            )
        count = metadata.num_reqs
        lengths = metadata.seq_lens if metadata.seq_lens_cpu_upper_bound is None else metadata.seq_lens_cpu_upper_bound
        prompts, after = metadata.rswa_prefix_lens[:count].tolist(), lengths[:count].tolist()
        starts = metadata.query_start_loc_cpu[: count + 1].tolist()
        rows = []
        for index, (prompt, length) in enumerate(zip(prompts, after, strict=True)):
            first, last = starts[index], starts[index + 1]
            if last > first and prompt > 0 and last - first <= length:
                rows.append(Row(index, first, last, prompt, length - (last - first), length))
        return rows

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, device=self._device)

    # --- recording

    @property
    def _records(self) -> bool:
        return bool(self.window) or self._collects

    def _capture(self, rows: list[Row], step: Step) -> None:
        """Which queries are recorded: those that the next event will look at."""
        early: list[tuple[int, int, int]] = []  # slot, first query, first position, and so on for each token
        late: list[tuple[int, int, int]] = []
        pages = step.metadata.block_table_tensor
        self._by_row: dict[int, Record] = {}
        for row in rows:
            event = self._event(row)
            upcoming = self.eviction_schedule.next_event(row.prompt, row.after)
            soon = upcoming is not None and upcoming - row.after < self.window
            collecting = self._collects and row.before < row.prompt
            before = int(pages[row.index, max(row.before - 1, 0) // self.block_size])
            page = int(pages[row.index, (row.after - 1) // self.block_size])
            if not (event or soon or collecting):
                self.windows.forget(before)
                self.windows.forget(page)  # another request's, that held this page before
                continue
            start = max(row.before, (event or row.after) - self.window)
            record = self.windows.follow(before, page, start, row.before, row.after)
            self._by_row[row.index] = record
            if event:
                early += self._span(row, record, start, event)
                start = max(event, row.after - self.window)
            if soon:
                (late if event else early).extend(self._span(row, record, start, row.after))
            if collecting:
                step.chunks.append(self._chunk(row, record, pages[row.index]))
        step.early, step.late = self._to_capture(early), self._to_capture(late)

    def _chunk(self, row: Row, record: Record, blocks: Int[Tensor, " width"]) -> Chunk:
        until = min(row.prompt, row.after)
        if record.prompt is None:
            record.prompt = Prompts([Accumulators(self.needs) for _ in self.layers])
        if record.prompt.tokens == row.before:
            record.prompt.tokens = until
        # Nothing has compressed a prompt before its end.
        blocks = blocks[: -(-until // self.block_size)].long()
        subpages = blocks * self.kv_heads + torch.arange(self.kv_heads, device=self._device)[:, None]
        return Chunk(record.prompt, row.first, row.first + until - row.before, row.before, subpages)

    def _span(self, row: Row, record: Record, start: int, stop: int) -> list[tuple[int, int, int]]:
        if not self.window:
            return []
        return [
            (row.first + position - row.before, record.slot, position % self.window) for position in range(start, stop)
        ]

    def _to_capture(self, places: list[tuple[int, int, int]]) -> Capture | None:
        if not places:
            return None
        return Capture(*self._tensor(places).unbind(1))

    # --- events

    def _event(self, row: Row) -> int:
        """The point in this step at which the request is compressed; 0 where nothing is to drop."""
        eviction_schedule = self.eviction_schedule
        at = (eviction_schedule.compressed if eviction_schedule.fixed else eviction_schedule.event)(
            row.prompt, row.after
        )
        return at if at > row.before else 0

    def _window(self, rows: list[Row], ats: list[int]) -> dict[str, Any]:
        """What an event is told about recorded queries."""
        if not self._records:
            return {}
        records = [self._by_row[row.index] for row in rows]
        for row, record, at in zip(rows, records, ats, strict=True):
            lost = self.window and record.start > max(at - self.window, 0) and record.start > self._shared(row)
            unseen = self._collects and at == row.prompt and (record.prompt is None or record.prompt.tokens < at)
            if lost or unseen:
                raise RuntimeError("keepset lost the queries of a request that is to be compressed.")
        return {
            "records": records,
            "slots": self._tensor([record.slot for record in records]),
            "window": self._tensor(ats)[:, None] + torch.arange(-self.window, 0, device=self._device),
        }

    def _shared(self, row: Row) -> int:
        """First tokens that may have come from another request's pages, so that their queries were not seen."""
        return self.eviction_schedule.shareable(row.prompt) or 0

    # --- all heads keep equally many entries: the same table for all, shifted

    def _plan_shifted(self, rows: list[Row], step: Step) -> None:
        eviction_schedule, size = self.eviction_schedule, self.block_size
        dropped = [0] * step.metadata.num_reqs
        groups: defaultdict[tuple[int, int, int, bool, bool], list[Row]] = defaultdict(list)
        for row in rows:
            gone = dropped[row.index] = eviction_schedule.dropped(row.prompt, row.before)
            if at := self._event(row):
                left = row.after - eviction_schedule.dropped(row.prompt, row.after)
                groups[row.after - gone, row.after - at, left, gone > 0, at == row.prompt].append(row)
        table = step.metadata.block_table_tensor
        for (width, newer, left, compressed, ends_prompt), members in groups.items():
            ats = [row.after - newer for row in members]
            step.events.append(
                Event(
                    rows=self._tensor([row.index for row in members]),
                    at=self._tensor(ats),
                    prompts=self._tensor([row.prompt for row in members]),
                    newer=newer,
                    width=width,
                    keep=left - newer,
                    compressed=compressed,
                    ends_prompt=ends_prompt,
                    shifted=self._shifted(members, table, width, left),
                    **self._window(members, ats),
                )
            )
        if any(dropped):
            lost = self._tensor(dropped)
            self._shift_slots(step.metadata, lost)
            columns = torch.arange(table.shape[1], device=self._device) + (lost // size)[:, None]
            bound = step.metadata.seq_lens_cpu_upper_bound
            step.metadata = step.metadata.replace(
                block_table_tensor=table.gather(1, columns.clamp(max=table.shape[1] - 1)),
                seq_lens=step.metadata.seq_lens - lost.to(step.metadata.seq_lens),
                seq_lens_cpu_upper_bound=None if bound is None else bound - torch.tensor(dropped, dtype=bound.dtype),
                max_seq_len=max(row.after - dropped[row.index] for row in rows),
                _num_computed_tokens_cache=None,
            )

    def _shifted(self, rows: list[Row], table: Tensor, width: int, left: int) -> Shifted:
        """Entries lie in their blocks from the first that is not freed; and so they will afterwards."""
        eviction_schedule = self.eviction_schedule
        indices = self._tensor([row.index for row in rows])
        heads = torch.arange(self.kv_heads, device=self._device)[:, None]

        def subpages(gone: list[int], entries: int) -> Tensor:
            first = self._tensor(gone)[:, None] // self.block_size
            columns = first + torch.arange(-(-entries // self.block_size), device=self._device)
            return table[indices[:, None], columns].long()[:, None] * self.kv_heads + heads

        gone = [eviction_schedule.dropped(row.prompt, row.before) for row in rows]
        # Nothing was packed at events that dropped nothing: what came since the one before is whole.
        kept = [
            eviction_schedule.compressed(row.prompt, row.before) - d if d else 0
            for row, d in zip(rows, gone, strict=True)
        ]
        shape = (len(rows), self.kv_heads)
        return Shifted(
            before=subpages(gone, width),
            after=subpages([eviction_schedule.dropped(row.prompt, row.after) for row in rows], left),
            counts=self._tensor(kept)[:, None].expand(shape),
            entries=torch.full(shape, width, device=self._device),
        )

    def held(self, event: Event, place: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sub-pages, entries kept at the event before, and entries of each head in one layer."""
        if event.shifted is not None:
            return event.shifted.before, event.shifted.counts, event.shifted.entries
        assert self.ragged is not None
        return self.ragged.held(event.rows, place)

    def settle(
        self, event: Event, place: int, left: Int[Tensor, "rows kv_heads"]
    ) -> Int[Tensor, "rows kv_heads pages"] | None:
        """Sub-pages that will hold each head's entries in one layer, now that it is known how many it has.

        None where they would take more pages than the request has: then the layer stays as it is.
        """
        if event.shifted is not None:
            return event.shifted.after
        assert self.ragged is not None and event.table is not None
        return self.ragged.settle(event.rows, place, left, event.table, event.first)

    def _shift_slots(self, metadata: CommonAttentionMetadata, gone: Tensor) -> None:
        """Moves the new tokens' slots to where their requests' entries end.

        In place, because the layers write to the cache with the very tensor that is here.
        """
        shift = gone % self.block_size
        if not bool(shift.any()):
            return
        table, slots = metadata.block_table_tensor, metadata.slot_mapping
        starts = metadata.query_start_loc_cpu.long().to(self._device)
        lengths = starts[1:] - starts[:-1]
        row = torch.repeat_interleave(torch.arange(lengths.shape[0], device=self._device), lengths)
        place = (
            torch.arange(row.shape[0], device=self._device)
            - starts[row]
            + (metadata.seq_lens.long() - lengths - shift)[row]
        )
        moved = table[row, place // self.block_size].long() * self.block_size + place % self.block_size
        slots[: row.shape[0]] = torch.where(shift[row] > 0, moved, slots[: row.shape[0]])

    # --- heads differ: a table for each

    def _plan_ragged(self, rows: list[Row], step: Step) -> None:
        eviction_schedule, metadata = self.eviction_schedule, step.metadata
        groups: defaultdict[tuple[int, int, int, bool], list[Row]] = defaultdict(list)
        compressed = []
        for row in rows:
            done = (
                eviction_schedule.dropped(row.prompt, row.before)
                if eviction_schedule.fixed
                else eviction_schedule.event(row.prompt, row.before)
            )
            compressed.append(done > 0)
            if at := self._event(row):
                groups[row.after, at, row.prompt, done > 0].append(row)
        assert self.ragged is not None
        step.ragged = self.ragged.advance(
            metadata.block_table_tensor[: len(rows)],
            self._tensor([row.before for row in rows]),
            self._tensor([row.after for row in rows]),
            metadata.query_start_loc_cpu[: len(rows) + 1].long().to(self._device),
            compressed,
            bool(groups),
            all(row.last - row.first == 1 for row in rows),
            self._blocks,
        )
        for (after, at, prompt, was_compressed), members in groups.items():
            if step.ragged is not None and not eviction_schedule.fixed:
                for row in members:
                    freed_blocks.put(self.ragged, int(step.ragged.pages[row.index]))
            ats, freed = [at] * len(members), eviction_schedule.freed(prompt, after)
            step.events.append(
                Event(
                    rows=self._tensor([row.index for row in members]),
                    at=self._tensor(ats),
                    prompts=self._tensor([row.prompt for row in members]),
                    newer=after - at,
                    width=after,
                    keep=at - eviction_schedule.dropped(prompt, after) if eviction_schedule.fixed else None,
                    compressed=was_compressed,
                    ends_prompt=at == prompt,
                    table=metadata.block_table_tensor,
                    first=self._tensor([freed] * len(members)) if eviction_schedule.fixed else None,
                    **self._window(members, ats),
                )
            )
