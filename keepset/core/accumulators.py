"""`Accumulators`: everything that is collected of one layer over a prompt."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from jaxtyping import Int
from torch import Tensor

from keepset.core.accumulator import Chunk
from keepset.core.feature import Feature


class Accumulators:
    """Everything with an accumulator among some features, for one layer, over one or more chunks of a prompt.

    Args:
        needs: the features.

    Attributes:
        seconds: time that features took, by their `cost`. A prefill that collects for many methods at once can so say
            what each of them would have cost.
    """

    def __init__(self, needs: Iterable[Feature[Any]]) -> None:
        self.seconds: defaultdict[Hashable, float] = defaultdict(float)
        together: defaultdict[Hashable, list[Feature[Any]]] = defaultdict(list)
        for feature in needs:
            together[feature.cost].append(feature)
        self._parts = {
            cost: type(features[0]).accumulator(features)
            for cost, features in together.items()
            if type(features[0]).accumulator
        }

    def __bool__(self) -> bool:
        """Return whether anything is collected, for which every token of a prompt is needed."""
        return bool(self._parts)

    def add(self, chunk: Chunk) -> None:
        """Take in one chunk."""
        for cost, part in self._parts.items():
            with self.timed(cost):
                part.add(chunk)

    def fork(self) -> Self:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied.seconds = self.seconds.copy()
        copied._parts = {cost: copy.copy(part) for cost, part in self._parts.items()}
        return copied

    def merged_with(self, others: Sequence[Accumulators]) -> Accumulators:
        """Return accumulators of its own requests and, after them, of others; all have reached their prompt's end."""
        if not others:
            return self
        copied = self.fork()
        for cost, part in self._parts.items():
            copied._parts[cost] = part.merged_with([other._parts[cost] for other in others])
        return copied

    def values(self, lengths: Int[Tensor, " batch"], width: int = 0) -> dict[Feature[Any], Any]:
        """Return what was collected, as an Observation's features.

        Args:
            lengths: tokens of each request.
            width: entries to make a place for, at least.
        """
        values: dict[Feature[Any], Any] = {}
        for cost, part in self._parts.items():
            with self.timed(cost):
                values |= part.values(lengths, width)
        return values

    @contextmanager
    def timed(self, cost: Hashable) -> Iterator[None]:
        """Return a context whose time is filed under this cost."""
        start = time.perf_counter()
        yield
        self.seconds[cost] += time.perf_counter() - start
