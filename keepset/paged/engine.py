"""Interfaces of an engine's adapter: what an engine with a paged cache provides, so that keepset can plan its steps.

docs/engines.md says when each is called, what else is set up, and what ragged heads need beyond `Pages`.
vLLM's adapter (`keepset.vllm`) implements them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from keepset.core.shapes import HiddenStates, Queries
from keepset.paged.pages import Pages
from keepset.paged.step import StepBatch, StepPlan


@dataclass(frozen=True)
class EngineSize:
    """Numbers that an engine fixes when it starts.

    Attributes:
        max_requests: requests that run at once, at most.
        blocks: blocks of the whole pool.
        drafts: how many of a request's newest tokens may be taken back after a step, at most. None of them reaches an
            event (`EvictionSchedule.draftable`).
        replays: whether graphs of steps that only decode are replayed; all of these steps must then do the same.
    """

    max_requests: int
    blocks: int
    drafts: int = 0
    replays: bool = False


@runtime_checkable
class StepAdapter(Protocol):
    """Translates the engine's metadata of a step for a group of layers that share block tables."""

    def batch(self, metadata: Any) -> StepBatch:
        """Return the step as the engine scheduled it.

        Args:
            metadata: the engine's, with lengths and tables as if nothing had ever been dropped.

        Returns:
            The step; without requests for a dummy run.

        Raises:
            UnsupportedEngineError: the engine does not say what keepset needs to know.
        """

    def planned(self, metadata: Any, plan: StepPlan) -> Any:
        """Return the engine's metadata for what the layers really hold.

        Args:
            metadata: the engine's, as `batch` was given it.
            plan: the step's plan.

        Returns:
            The metadata, with the tables and lengths of `plan.shifted`, if there are any.
        """


@runtime_checkable
class LayerAdapter(Protocol):
    """One attention layer of the engine, in each process that computes."""

    def pages(self, layer: Any, kv_cache: Any) -> Pages:
        """Return the layer's cache as sub-pages.

        Args:
            layer: the layer object that the engine passes to its attention.
            kv_cache: the engine's cache of the layer.
        """


@runtime_checkable
class QueryProjection(Protocol):
    """How a layer makes queries of hidden states; only recipes that look at hidden states need it."""

    hidden: Float[Tensor, "tokens hidden"] | None
    """The input of the layer's attention in the forward under way."""

    def queries(self, hidden: HiddenStates) -> Queries:
        """Return the queries that the layer makes of other hidden states.

        Args:
            hidden: inputs of the layer's attention, after its norm.

        Returns:
            The queries before rotation, after the layer's own norm of queries if it has one.
        """


@runtime_checkable
class SchedulerAdapter(Protocol):
    """The blocks of one group of layers, in the process that schedules."""

    def release(self, request_id: str, blocks: int) -> None:
        """Give a request's first blocks back to the pool, and keep the others at their logical places.

        Args:
            request_id: the engine's name of the request.
            blocks: how many, counted from the first, including blocks that were released before.
        """
