"""`EventFigures`: what the events of an answer come to, while it is decoded."""

from collections.abc import Mapping
from statistics import fmean

from keepset.bench.analysis.diagnostics import Snapshot, by_depth, middle_retention, retained_iou, wipeout_rate
from keepset.hf.cache import Cache


class EventFigures:
    """Means over an answer's events, layers and KV heads, of a cache of one request; no event's KeepSet is kept.

    `look` is for every token: it does nothing where no event has come.
    """

    def __init__(self) -> None:
        self._length = 0
        self._before: Snapshot | None = None
        self._events: list[dict[str, float]] = []

    def look(self, cache: Cache) -> None:
        """Notes the newest event, if it is a new one; nothing of a recipe that compresses the prompt only."""
        if cache.schedule.every is None or not cache.events or cache.events[-1].length == self._length:
            return
        event = cache.events[-1]
        assert event.keep_set is not None
        self._length = event.length
        snapshot = Snapshot(event.keep_set, event.keep_set.counts.new_tensor([event.length]))
        figures = {"wipeout": float(wipeout_rate(snapshot).mean()), "middle": float(middle_retention(snapshot).mean())}
        if self._before is not None:
            iou = retained_iou(self._before, snapshot)
            figures["iou"] = float(iou.mean())
            figures |= {f"iou_{stage}": value for stage, value in by_depth(iou).items()}
        self._before = snapshot
        self._events.append(figures)

    @property
    def means(self) -> Mapping[str, float]:
        """By the names of an `Outcome`; those that nothing is known of are not there."""
        names = dict.fromkeys(name for figures in self._events for name in figures)
        return {name: fmean(figures[name] for figures in self._events if name in figures) for name in names}
