"""`TimeLeft`: how long a sweep still takes, told by what its groups took so far."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from keepset.bench.sweep.sweep import Group
from keepset.bench.tasks.task import Task


class TimeLeft:
    """Measures the groups that are to be made, in their order, as their cells are made.

    Only whole groups count: the cells of one share a prefill, which the first of them waits for.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._order = [(group.task, len(group.candidates)) for group in groups]
        self._left = Counter(group.task.name for group in groups)
        self._tasks = {group.task.name: group.task for group in groups}
        self._took: dict[str, list[float]] = {}
        self._began, self._cells = time.monotonic(), 0

    def advance(self, count: int = 1) -> None:
        """Take notice of cells that were made."""
        self._cells += count
        while self._order and self._cells >= self._order[0][1]:
            task, cells = self._order.pop(0)
            now = time.monotonic()
            self._took.setdefault(task.name, []).append(now - self._began)
            self._began, self._cells = now, self._cells - cells
            self._left[task.name] -= 1

    def seconds(self) -> float | None:
        """Return the seconds that the rest takes; None before a group is done."""
        if not self._took:
            return None
        return sum(groups * self._mean(self._tasks[name]) for name, groups in self._left.items() if groups)

    def _mean(self, task: Task) -> float:
        """Return the mean seconds of a group; of a task that has none yet, by those of others and their lengths."""
        if (took := self._took.get(task.name)) is not None:
            # The first group has what is done once. Of tasks that decode, many end together with the first.
            return fmean(took[1:] if len(took) > 1 and not task.decodes else took)
        means = {name: self._mean(self._tasks[name]) for name in self._took}
        length = getattr(task, "length", None)
        lengths = {name: getattr(self._tasks[name], "length", None) for name in means}
        if length is None or None in lengths.values():
            return fmean(means.values())
        return length * fmean(mean / (lengths[name] or 1) for name, mean in means.items())
