"""`Planner`: from what an engine schedules for one step to what keepset's attention layers do in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keepset.kernels.page_layout import PageGroup, PageLayout
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.page_tables import FreedBlocks, PagesOfLayers, PerHeadTables
from keepset.paged.ragged_plan import RaggedPlanner
from keepset.paged.recording import Recording
from keepset.paged.recording_plan import CapturePlanner
from keepset.paged.request_notes import RequestNote, RequestNotes
from keepset.paged.step import StepBatch, StepPlan
from keepset.paged.uniform_plan import UniformPlanner
from keepset.recipe import Recipe


class Planner:
    """Plans the steps of one group of layers, in each process that computes.

    Args:
        schedule: when requests are compressed; the group's layers have the same.
        recording: what is recorded of queries for that.
        layers: the group's, by their indices in the model.
        max_requests: how many can run at once.
        blocks: in the whole pool.
        freed_blocks: is told of events whose counts come from the data.
        replays: whether graphs of steps that only decode are replayed: then all of these do the same.

    Attributes:
        schedule, recording, layers: as given.
        notes: what is known of single requests.
    """

    def __init__(
        self,
        schedule: EvictionSchedule,
        recording: Recording,
        layers: Sequence[int],
        max_requests: int,
        blocks: int,
        freed_blocks: FreedBlocks,
        replays: bool = False,
    ) -> None:
        self.notes = RequestNotes(schedule.block_size)
        self.schedule, self.recording, self.layers = schedule, recording, tuple(layers)
        self._capture = CapturePlanner(schedule, recording, len(self.layers), max_requests)
        self._tables: RaggedPlanner | UniformPlanner
        if schedule.ragged:
            tables = PerHeadTables(len(layers), schedule.kv_heads, schedule.block_size, blocks, max_requests)
            self._tables = RaggedPlanner(schedule, tables, freed_blocks, self._capture, replays)
        else:
            group = PageGroup(range(len(layers)), len(layers), blocks)
            self._tables = UniformPlanner(schedule, self._capture, group, max_requests)

    def begin(self, name: str, page: int, layout: PageLayout, recipe: Recipe | None, prompt: int) -> None:
        """A request goes on after a context.

        Args:
            name: the request's.
            page: of its own that has the newest token.
            layout: what its pages follow from.
            recipe: by which it is compressed further; None if it is not.
            prompt: tokens from which on that is so.
        """
        assert isinstance(self._tables, RaggedPlanner)
        self._tables.begin(page, layout)
        own = self.schedule.under(recipe, counted=False)
        self.notes.file(page, RequestNote(name, int(layout.length[0, 0]), after_context=True, own=own, prompt=prompt))

    def export_request(self, blocks: Sequence[int], length: int) -> PagesOfLayers:
        """Where the entries of a request of so many tokens lie, once it has ended; or a RuntimeError."""
        assert isinstance(self._tables, RaggedPlanner)
        return self._tables.export_request(blocks, length)

    def plan(self, batch: StepBatch) -> StepPlan:
        """What the group's layers do in this step.

        Args:
            batch: the step as the engine scheduled it. Its `slot_mapping` is altered in place.

        Returns:
            The plan, the same for all layers of the group; of a dummy run, what a graph is to remember of it.

        Raises:
            RuntimeError: a compressed request is not where it was left.
        """
        plan = StepPlan(batch.slot_mapping, dummy=not batch.requests)
        if batch.requests:
            batch = replace(batch, requests=self.notes.with_overrides(batch))
            self._capture.plan(batch, plan, self._tables.entries)
        self._tables.plan(batch, plan)
        return plan
