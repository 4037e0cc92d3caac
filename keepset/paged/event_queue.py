"""`EventQueue`: compressions that a step has brought due are executed before the next one, in all layers at once.

Between two steps nothing writes to the pages: whoever was given those of a request that ended meanwhile writes to them
in a step that is yet to come. So an event needs nobody's leave, and is executed even where its request is gone.
"""

from __future__ import annotations

import time

from keepset.core.keep_set import LazyHostInts
from keepset.paged.layer_group import LayerGroup
from keepset.paged.page_tables import FreedBlocks
from keepset.paged.step import EvictionEvent, StepBatch, StepPlan


class EventQueue:
    """Plans the steps of all groups of layers.

    Args:
        freed_blocks: is told once what events emptied is known.

    Attributes:
        steps: of each group the one that was planned last, whose events are due.
    """

    def __init__(self, freed_blocks: FreedBlocks) -> None:
        self._freed_blocks = freed_blocks
        self.steps: dict[LayerGroup, StepPlan] = {}

    def plan(self, group: LayerGroup, batch: StepBatch) -> StepPlan:
        """What the group's layers do in this step; executes first what the step before it has brought due.

        Every step is planned for all groups, in any order, before it is computed.

        Args:
            group: of layers.
            batch: the step as the engine scheduled it. Its `slot_mapping` is altered in place.

        Raises:
            RuntimeError: a compressed request is not where it was left.
        """
        if group in self.steps:
            self.run()
        plan = self.steps[group] = group.planner.plan(batch)
        return plan

    def run(self) -> None:
        """Executes what is due."""
        steps, self.steps = self.steps, {}
        for group, plan in steps.items():
            group.record_replayed(plan)
        events = [plan.events for plan in steps.values()]
        for group, plan in steps.items():
            group.add_up(plan)
        if any(events):
            if next(iter(steps)).recipe.method.across_layers:
                for across in zip(*events, strict=True):
                    _compress_across(list(zip(steps, across, strict=True)))
            else:
                for group, due in zip(steps, events, strict=True):
                    for event in due:
                        group.compress(event)
            for group, due in zip(steps, events, strict=True):
                for event in due:
                    group.forget(event)
            self._freed_blocks.settle()
        for group, plan in steps.items():
            group.record_late(plan)


def _compress_across(due: list[tuple[LayerGroup, EvictionEvent]]) -> None:
    """Executes one event of a recipe that looks across layers: it is shown all of them before anything moves."""
    start, first = time.perf_counter(), due[0][1]
    recipe = first.recipe
    if any(event.rows != first.rows for _, event in due):
        raise RuntimeError("keepset lost count of the requests of an event that looks across layers.")
    reached = [(group, event, entries) for group, event in due for entries in group.read(event)]
    reached.sort(key=lambda one: one[2].observation.layer_ids)
    chosen = recipe.method.select_all([entries.observation for _, _, entries in reached], recipe.budget)
    kept = [chosen.layer(entries.observation.layer_ids[0]) for _, _, entries in reached]
    deals = [group.deal(event, entries, mine) for (group, event, entries), mine in zip(reached, kept, strict=True)]
    LazyHostInts.read(
        [numbers for mine, deal in zip(kept, deals, strict=True) for numbers in (mine.heads, *deal.asked)]
    )
    for (group, event, entries), mine, deal in zip(reached, kept, deals, strict=True):
        if not event.is_counted(mine):
            raise RuntimeError(f"{recipe} kept another number of entries than its quotas say.")
        group.execute(event, entries, mine, deal, start)
        start = time.perf_counter()
