"""`AttentionColumns`: what every entry received of the prompt's own causal attention."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.accumulator import Accumulator, Chunk, widened
from keepset.core.feature import Feature
from keepset.kernels.columns import ColumnAccumulator, ColumnStatistic

PROMPT_ATTENTION = "looks at the attention of the whole prompt, and only there"
"""Why this and its like do not exist at later events."""


class _Columns(Accumulator):
    def __init__(self, features: Sequence[AttentionColumns]) -> None:
        self._features = features
        self._requests: list[ColumnAccumulator] = []

    def add(self, chunk: Chunk) -> None:
        entries = chunk.entries()
        names = [feature.statistic for feature in self._features]
        requests = [copy.copy(columns) for columns in self._requests] or [ColumnAccumulator(names) for _ in entries]
        for request, (columns, (keys, own)) in enumerate(zip(requests, entries, strict=True)):
            lse = None if chunk.lse is None else chunk.lse[request]
            columns.add(chunk.queries[request][:, own], keys, chunk.scaling, lse)
        self._requests = requests

    def joined(self, others: Sequence[_Columns]) -> _Columns:
        twin = copy.copy(self)
        twin._requests = [columns for part in (self, *others) for columns in part._requests]
        return twin

    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[Feature[Any], Any]:
        return {
            feature: widened([columns.statistics[feature.statistic] for columns in self._requests], width)
            for feature in self._features
        }


@dataclass(frozen=True)
class AttentionColumns(Feature[Float[Tensor, "batch query_heads entries"]]):
    """A statistic of each column of the prompt's causal attention, streamed: no attention matrix exists.

    Its value is `[batch, query_heads, entries]`.

    Attributes:
        statistic: the sum or the maximum.
    """

    log_sum_exp = True
    accumulator = _Columns
    prompt_only = PROMPT_ATTENTION

    statistic: ColumnStatistic

    @property
    def name(self) -> str:
        return f"column {self.statistic}"
