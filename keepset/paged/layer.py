"""`PagedLayer`: what one attention layer does in a step besides attending."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from keepset.core.rope import RotaryTable
from keepset.paged.compaction import Compactor, CountEviction
from keepset.paged.engine import Pages, QueryProjection
from keepset.paged.layer_barrier import LayerBarrier
from keepset.paged.observer import Observer
from keepset.paged.planner import Planner
from keepset.paged.step import StepPlan


class PagedLayer:
    """One layer of a planner's group.

    Args:
        planner: of the group.
        place: the layer's in the group.
        scaling: what the model multiplies query-key products with.
        rotary: of the model, where the recipe looks at queries before rotation.
        projection: of the layer, where the recipe looks at hidden states.
        barrier: of all layers, where the recipe looks across layers.
        count: is told of every compression.
    """

    def __init__(
        self,
        planner: Planner,
        place: int,
        scaling: float,
        rotary: RotaryTable | None,
        projection: QueryProjection | None,
        barrier: LayerBarrier | None,
        count: CountEviction | None,
    ) -> None:
        self._place, self._windows, self._barrier = place, planner.windows, barrier
        needs = planner.schedule.recipe.method.needs
        self._observer = Observer(needs, planner.windows, place, scaling, rotary, projection)
        self._compactor = Compactor(planner.schedule, planner.layers[place], place, self._observer, count)

    def after_attention(self, plan: StepPlan, queries: Float[Tensor, "n query_heads head_dim"], pages: Pages) -> None:
        """Records what events will look at, and executes those of this step.

        Args:
            plan: of the layer's group.
            queries: of the step, after rotation.
            pages: the layer's cache, with the step's entries in it.
        """
        for chunk in plan.chunks:
            self._observer.collect(chunk, queries, pages)
        if plan.captured_before is not None:
            self._windows.add(self._place, queries, plan.captured_before)
        if plan.events and self._barrier is not None:
            self._barrier.add(self._compactor, [self._compactor.begin(event, pages) for event in plan.events])
        else:
            for event in plan.events:
                self._compactor.compress(event, pages)
        if plan.captured_after is not None:
            self._windows.add(self._place, queries, plan.captured_after)
