"""`EventQueue`: compressions that a step has brought due are executed before the next one, in all layers at once.

Between two steps nothing writes to the pages: whoever was given the pages of a request that has ended writes to them in
a step that is yet to come. So an event can be executed even where its request is gone.
"""

from __future__ import annotations

from keepset.paged.event_execution import compress, compress_across
from keepset.paged.freed_blocks import FreedBlocks
from keepset.paged.layer_group import LayerGroup
from keepset.paged.step import StepBatch, StepPlan


class EventQueue:
    """Plans the steps of all groups of layers, and executes what they bring due.

    Args:
        freed_blocks: is told once the events of a step are over.

    Attributes:
        steps: for each group the step that was planned last, whose events are due.
    """

    def __init__(self, freed_blocks: FreedBlocks) -> None:
        self._freed_blocks = freed_blocks
        self.steps: dict[LayerGroup, StepPlan] = {}

    def plan(self, group: LayerGroup, batch: StepBatch) -> StepPlan:
        """Return what a group's layers do in a step; execute first what the step before has brought due.

        Every step is planned for all groups, in any order, before it is computed.

        Args:
            group: the group of layers.
            batch: the step as the engine scheduled it. Its `slot_mapping` is altered in place.

        Raises:
            RuntimeError: a compressed request is not where it was left.
        """
        if group in self.steps:
            self.run()
        plan = self.steps[group] = group.planner.plan(batch)
        return plan

    def run(self) -> None:
        """Execute what is due: what the steps' plans say after their layers, list by list."""
        steps, self.steps = self.steps, {}
        for group, plan in steps.items():
            group.record_replayed(plan)
        for group, plan in steps.items():
            group.run(plan.before_events)
        if any(plan.events for plan in steps.values()):
            self._run_events(steps)
        for group, plan in steps.items():
            group.run(plan.after_events)

    def _run_events(self, steps: dict[LayerGroup, StepPlan]) -> None:
        if next(iter(steps)).recipe.method.traits.across_layers:
            for events in zip(*(plan.events for plan in steps.values()), strict=True):
                compress_across(list(zip(steps, events, strict=True)))
        else:
            for group, plan in steps.items():
                for event in plan.events:
                    compress(group, event)
        for group, plan in steps.items():
            for event in plan.events:
                for record in event.records:
                    group.columns.forget(record.slot)
        self._freed_blocks.settle()
