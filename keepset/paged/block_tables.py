"""`BlockTables`: where the entries of requests lie in the layers of a group, step by step.

There are two kinds. Heads that keep equally many entries share one block table per request (`equal_heads.py`). Heads
that keep different numbers have pages of their own, which follow from their counts (`ragged_heads.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

from keepset.kernels.paged_arguments import EntriesInPages
from keepset.paged.event_pages import EventPages
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.step import ScheduledRequest, StepBatch, StepPlan


class BlockTables(ABC):
    """Tables of one group of layers.

    Args:
        schedule: when the group's requests are compressed.
    """

    def __init__(self, schedule: EvictionSchedule) -> None:
        self.schedule = schedule

    def schedule_of(self, request: ScheduledRequest) -> EvictionSchedule:
        """Return when a request is compressed."""
        return request.own or self.schedule

    def was_compressed(self, request: ScheduledRequest) -> bool:
        """Return whether a request was compressed before this step."""
        schedule = self.schedule_of(request)
        return request.after_context or schedule.was_compressed(request.prompt, request.before)

    @abstractmethod
    def place_step(self, batch: StepBatch, plan: StepPlan, eventful: bool) -> None:
        """Place a step's tokens: alter the slot mapping, and tell attention where the entries lie.

        Args:
            batch: the step; of a dummy run, what a graph is to remember.
            plan: the step's plan, which is completed.
            eventful: whether some requests are compressed after the step.

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
        """Return an upper bound of the entries of each head of a request after the step."""

    @abstractmethod
    def event_key(self, request: ScheduledRequest) -> Hashable:
        """Return what must be equal of two requests that share an event, besides recipe and point."""

    @abstractmethod
    def event_pages(self, batch: StepBatch, requests: Sequence[ScheduledRequest]) -> EventPages:
        """Return the pages of the requests of an event, once the step was placed.

        Args:
            batch: the step.
            requests: those that are compressed after it, together.
        """
