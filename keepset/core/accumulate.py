"""`Accumulators`: what a layer's prompt tells, taken in chunk by chunk, in the same way under every runtime."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.accumulator import Chunk
from keepset.core.feature import Feature
from keepset.core.shapes import QueryHeadScores


class Accumulators:
    """Everything that has an accumulator among `needs`, of one layer, over one or more chunks of a prompt.

    `seconds` holds the time that each kind of feature took, so that a prefill which collects for many
    methods at once can say what each of them would have cost.
    """

    def __init__(self, needs: Iterable[Feature[Any]]) -> None:
        self.seconds: defaultdict[Hashable, float] = defaultdict(float)
        kinds: defaultdict[type[Feature[Any]], list[Feature[Any]]] = defaultdict(list)
        for feature in needs:
            kinds[type(feature)].append(feature)
        made = {kind: kind.accumulator(features) for kind, features in kinds.items()}
        self._parts = {kind: part for kind, part in made.items() if part is not None}

    def __bool__(self) -> bool:
        """Whether anything is collected, which takes every token of a prompt."""
        return bool(self._parts)

    def add(self, chunk: Chunk) -> None:
        """Takes one chunk in."""
        for kind, part in self._parts.items():
            with self.timed(kind):
                part.add(chunk)

    def fork(self) -> Self:
        """An independent copy."""
        twin = copy.copy(self)
        twin.seconds = self.seconds.copy()
        twin._parts = {kind: copy.copy(part) for kind, part in self._parts.items()}
        return twin

    def joined(self, others: Sequence[Accumulators]) -> Accumulators:
        """Those of this one's requests and of others after them, each of which has come to its prompt's end."""
        if not others:
            return self
        twin = self.fork()
        for kind, part in self._parts.items():
            twin._parts[kind] = part.joined([other._parts[kind] for other in others])
        return twin

    def values(self, lengths: Int[Tensor, " batch"], width: int = 0) -> dict[Feature[Any], Any]:
        """What was collected of requests of these lengths, for at least `width` entries: an Observation's features."""
        values: dict[Feature[Any], Any] = {}
        for kind, part in self._parts.items():
            with self.timed(kind):
                values |= part.values(lengths, width)
        return values

    @contextmanager
    def timed(self, cost: Hashable) -> Iterator[None]:
        """Files the time inside under this cost."""
        start = time.perf_counter()
        yield
        self.seconds[cost] += time.perf_counter() - start


def widened(columns: Sequence[Float[Tensor, "query_heads _"]], width: int) -> QueryHeadScores:
    """One column statistic of several requests, zero where a request has no entry."""
    longest = max(width, *(column.shape[-1] for column in columns))
    return torch.stack([F.pad(column, (0, longest - column.shape[-1])) for column in columns])
