"""`EventFigures`: means over the events of an answer while it is decoded."""

from collections.abc import Mapping
from statistics import fmean

import torch
from torch import Tensor

from keepset.bench.analysis.diagnostics import Snapshot, by_depth, middle_retention, retained_iou, wipeout_rate
from keepset.bench.analysis.trace import head_segments
from keepset.core.budget import Budget
from keepset.core.keep_set import KeepSet
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.hf.cache import Cache


class EventFigures:
    """Means over the events, layers and KV heads of one answer, whose cache holds one request.

    Call `look` after every token; it does nothing without a new event. Give `observe` to the cache as its observer, for
    methods that cut texts into segments. No event's KeepSet is kept.
    """

    def __init__(self, method: Method) -> None:
        self._method, self._length = method, 0
        self._before: Snapshot | None = None
        self._segments: list[tuple[float, float]] = []
        self._events: list[dict[str, float]] = []

    def observe(self, observation: Observation, budget: Budget, keep_set: KeepSet) -> None:
        """Note how many segments a head of this layer has, and how long they are."""
        if heads := head_segments(self._method, observation, budget):
            numbers = [len(head.ends) for head in heads]
            lengths = [len(head.mass) / number for head, number in zip(heads, numbers, strict=True)]
            self._segments.append((fmean(numbers), fmean(lengths)))

    def look(self, cache: Cache) -> None:
        """Note the newest event if it is new; do nothing for a recipe that compresses only the prompt."""
        if cache.schedule.every is None or not cache.events or cache.events[-1].length == self._length:
            return
        event = cache.events[-1]
        assert event.keep_set is not None
        self._length = event.length
        snapshot = Snapshot(event.keep_set, event.keep_set.counts.new_tensor([event.length]))
        figures = {"wipeout": float(wipeout_rate(snapshot).mean()), "middle": float(middle_retention(snapshot).mean())}
        if self._before is not None:
            figures |= _with_depths("iou", retained_iou(self._before, snapshot))
        if self._segments:
            number, length = torch.tensor(self._segments).unbind(-1)
            figures |= _with_depths("segments", number) | _with_depths("segment_length", length)
            self._segments.clear()
        self._before = snapshot
        self._events.append(figures)

    @property
    def means(self) -> Mapping[str, float]:
        """Means by the names of `FIGURES`; names without a value are left out."""
        names = dict.fromkeys(name for figures in self._events for name in figures)
        return {name: fmean(figures[name] for figures in self._events if name in figures) for name in names}


def _with_depths(name: str, values: Tensor) -> dict[str, float]:
    """Return the mean of a figure over all layers, and over the layers of each stage."""
    return {name: float(values.mean()), **{f"{name}_{stage}": value for stage, value in by_depth(values).items()}}
