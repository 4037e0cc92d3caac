"""`Planner`: plans the work of a group's attention layers in a step from what the engine has scheduled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from keepset.kernels.page_layout import EntriesInPages, PageGroup, PageLayout
from keepset.paged.block_tables import BlockTables, EqualHeadTables
from keepset.paged.courses import RequestCourses, SteadyRows
from keepset.paged.engine import EngineSize
from keepset.paged.eviction import EvictionEvent, EvictionSchedule, RequestPlan, batches_of_similar_length
from keepset.paged.layout_table import EmptiedBlocks
from keepset.paged.query_records import QueryAddition, QueryRecord
from keepset.paged.ragged_heads import RaggedHeadTables
from keepset.paged.recording_plan import RecordingPlanner
from keepset.paged.request_table import RequestTable
from keepset.paged.step import ScheduledRequest, StepBatch, StepPlan
from keepset.recipe import Recipe
from keepset.recording import Recording


class _EventKind(NamedTuple):
    """The facts that requests of one event share.

    Attributes:
        recipe: their recipe.
        fixed: whether the scheduler knows how many entries they keep.
        newer: entries after the event's point.
        compressed: whether they were compressed before.
        ends_prompt: whether the point is the prompt's end.
        sizes: the block tables' own key (`BlockTables.event_key`).
    """

    recipe: Recipe
    fixed: bool
    newer: int
    compressed: bool
    ends_prompt: bool
    sizes: Hashable


class Planner:
    """Plans the steps of one group of layers, in each process that computes.

    Args:
        schedule: when the group's requests are compressed.
        recording: which queries are recorded for that.
        layers: the group's layers, by their indices in the model.
        size: numbers that the engine fixes when it starts.
        emptied_blocks: is told of events whose counts come from the data.

    Attributes:
        requests: the states of the group's requests.
        tables: where the requests' entries lie.
    """

    def __init__(
        self,
        schedule: EvictionSchedule,
        recording: Recording,
        layers: Sequence[int],
        size: EngineSize,
        emptied_blocks: EmptiedBlocks,
    ) -> None:
        self.schedule, self.recording, self.layers = schedule, recording, tuple(layers)
        self.requests = RequestTable(schedule, size)
        self._recording_plan = RecordingPlanner(schedule, recording, len(layers), self.requests)
        self._courses = RequestCourses(schedule, self._recording_plan.quiet_until)
        self._steady: SteadyRows | None = None
        group = PageGroup(range(len(layers)), len(layers), size.blocks)
        self.tables: BlockTables
        if schedule.ragged:
            self.tables = RaggedHeadTables(schedule, group, size, emptied_blocks)
        else:
            self.tables = EqualHeadTables(schedule, group, size.max_requests)

    def begin(self, name: str, page: int, layout: PageLayout, plan: RequestPlan) -> None:
        """File a request that begins with a context.

        Args:
            name: the engine's name of the request.
            page: the page that holds the request's newest token, the context's last.
            layout: where the context's entries lie.
            plan: how the request is compressed further.
        """
        assert isinstance(self.tables, RaggedHeadTables)
        self.tables.begin(page, layout)
        self.requests.begin(page, int(layout.length[0, 0]), name, plan)

    def ended(self, page: int, tokens: int, entries: EntriesInPages) -> tuple[QueryRecord, QueryAddition]:
        """Return what was recorded of a turn that has ended; see `RecordingPlanner.of_ended`.

        Args:
            page: the page that holds the request's newest token.
            tokens: tokens of the request.
            entries: where its entries lie.
        """
        return self._recording_plan.of_ended(page, tokens, entries)

    def close(self, records: Sequence[QueryRecord]) -> None:
        """Forget records of requests whose events are over."""
        self.requests.close_records(records)

    def plan(self, batch: StepBatch) -> StepPlan:
        """Plan what the group's layers do in a step.

        Args:
            batch: the step, as the engine has scheduled it.

        Returns:
            The plan, the same for all layers of the group; for a dummy run, what a graph is to capture.

        Raises:
            RuntimeError: a compressed request is not where it was left.
        """
        plan = StepPlan(batch.slot_mapping, dummy=not batch.requests)
        if self._steady is not None and self._steady.go_on(batch.rows):
            self._recording_plan.go_on(batch, plan)
            self.tables.place_step(batch, self._steady.courses, plan, False)
            return plan
        rows = batch.rows
        if not plan.dummy:
            batch = self.requests.with_plans(batch)
        courses = self._courses.follow(batch.rows)
        active = list(batch.requests) if self._recording_plan.records_all else courses.active
        if not plan.dummy:
            self._recording_plan.plan(batch, active, plan, self.tables.entries)
        due = list(self._due(courses.active)) if courses.active else []
        self.tables.place_step(batch, courses, plan, bool(due))
        is_steady = not (plan.dummy or courses.active or self.recording.drafts)
        self._steady = SteadyRows(rows, courses) if is_steady else None
        if due:
            plan.events = [self._event(batch, kind, requests) for kind, requests in due]
        return plan

    def _due(self, active: Sequence[ScheduledRequest]) -> Iterator[tuple[_EventKind, list[ScheduledRequest]]]:
        """Yield requests that are compressed together after the step."""
        kinds: defaultdict[_EventKind, list[ScheduledRequest]] = defaultdict(list)
        for request in active:
            schedule = self.tables.schedule_of(request)
            if at := schedule.due(request.prompt, request.before, request.after):
                compressed, newer = schedule.was_compressed(request.prompt, request.before), request.after - at
                key = newer, compressed, at == request.prompt, self.tables.event_key(request)
                kinds[_EventKind(schedule.recipe, schedule.fixed, *key)].append(request)
        for kind, requests in kinds.items():
            widths = [self.tables.event_width(request) for request in requests]
            for similar in batches_of_similar_length(kind.recipe, requests, widths, self.schedule.kv_heads):
                yield kind, similar

    def _event(self, batch: StepBatch, kind: _EventKind, requests: list[ScheduledRequest]) -> EvictionEvent:
        """Return the event of requests that are compressed together, once the step is placed.

        Args:
            batch: the step.
            kind: what these requests' events have in common.
            requests: the requests.
        """
        points, keep = [request.after - kind.newer for request in requests], None
        if kind.fixed:
            gone = [self.tables.schedule_of(request).dropped(request.prompt, request.after) for request in requests]
            keep = [point - dropped for point, dropped in zip(points, gone, strict=True)]
        records = self._recording_plan.recorded(requests, points)
        return EvictionEvent(
            recipe=kind.recipe,
            rows=[request.row for request in requests],
            at=batch.tensor(points),
            earliest=min(points),
            latest=max(points),
            prompts=batch.tensor([request.prompt for request in requests]),
            newer=kind.newer,
            keep=keep,
            compressed=kind.compressed,
            ends_prompt=kind.ends_prompt,
            equal_heads=not self.schedule.ragged,
            pages=self.tables.event_pages(batch, requests),
            records=records,
            slots=batch.tensor([record.slot for record in records]),
        )
