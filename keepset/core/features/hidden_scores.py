"""`HiddenScores`: scores of entries by a module on hidden states, computed while entries are written."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.accumulator import Accumulator, Chunk, widened
from keepset.core.feature import Feature
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.observation import Observation
from keepset.core.shapes import Scores


class _Scores(Accumulator):
    def __init__(self, features: Sequence[HiddenScores]) -> None:
        self._requests: dict[HiddenScores, list[list[Tensor]]] = {feature: [] for feature in features}
        """For each feature and request, the scores of its real tokens, `[kv_heads, n]` a chunk."""

    def add(self, chunk: Chunk) -> None:
        grown = {}
        for feature, requests in self._requests.items():
            rows = chunk.entry_scores[feature]
            own = [row[:, chunk.every(1, request)] for request, row in enumerate(rows)]
            grown[feature] = [[*old, new] for old, new in zip(requests or [[] for _ in own], own, strict=True)]
        self._requests = grown

    def merged_with(self, others: Sequence[_Scores]) -> _Scores:
        copied = copy.copy(self)
        copied._requests = {
            feature: [request for part in (self, *others) for request in part._requests[feature]]
            for feature in self._requests
        }
        return copied

    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[HiddenScores, Scores]:
        return {
            feature: widened([torch.cat(parts, 1) for parts in requests], width)
            for feature, requests in self._requests.items()
        }


@dataclass(frozen=True)
class HiddenScores(Feature[Scores]):
    """The score of every entry by a module on the hidden states that enter its layer's attention.

    A token is scored when its entry is written, so no hidden state is kept, only a number per entry and KV head.
    Between events it is a column of the entries; `Method.remember` must return the column to keep it.

    Attributes:
        file: the file of statistics that holds the modules; a method needs `statistics`, too.
        kind: the kind of module, as in `Statistics.hidden`.
    """

    hidden_states = True
    accumulator = _Scores
    name = "scores of hidden states"
    transformers_only = (
        "scores entries by their hidden states as they are written, which {engine} does not show: use a method that "
        "looks at entries, such as distilled"
    )

    file: str
    kind: str

    @property
    def statistics(self) -> ModelStatistics:
        """Return the statistics that hold the modules."""
        return ModelStatistics(self.file, modules=self.kind)

    @property
    def column(self) -> str:
        """Return the name of the entries' column; a method that keeps it has it among its `state_names`."""
        return f"score by {self.kind}"

    def of(self, observation: Observation) -> Scores:
        if self.column not in observation.state:
            raise self.missing()
        return observation.state[self.column]
