"""SecondPassAttention: keep what a task's tokens, or the prompt's own tokens, attend to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from keepset.core.feature import Needs
from keepset.core.features.attention import AttentionColumns, SecondPass
from keepset.core.features.runtime_features import OutputProjection
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import QueryHeadScores, Scores
from keepset.core.traits import Traits
from keepset.errors import RecipeError
from keepset.kernels.columns import ColumnStatistic


@dataclass(frozen=True)
class SecondPassAttention(Method):
    """Keeps what receives most attention (KVCompose 2025, arXiv:2509.05165, section 3.2: equations 14 to 16).

    Each entry's column of attention becomes one number per query head (`statistic`), and the numbers of a query group
    become one per KV head (`aggregate_group`). There is no sum, because it orders entries as the mean does, also over
    all layers.

    Attributes:
        task: the tokens that attend. `"context"` is the prompt, run once more on top of its own whole cache, or the
            questions that the cache was given (`task_tokens`). `"repeat"` is the prompt, after words that ask to repeat
            it; a chat template's opening always stays (see `kvzip`). `"self"` is the prompt's own causal attention, in
            one pass; few tokens see late entries, mostly these entries' own tokens.
        statistic: taken over the task's tokens; `"rms"` is the root of the mean square, and needs a second pass.
        aggregate_group: over the query heads that share a KV head.
        chunk: how many of the prompt's tokens run together; chunks do not see one another. 0 runs all at once.
        mean_term: whether the mean over all heads is added to each head's own number.
        values: the factor of attention (A.1.3): none, the value's norm, or the norm of the value after the query
            head's output projection.
    """

    name = "second_pass"
    paper = "arXiv:2509.05165"

    task: str = parameter("context", choices=("context", "repeat", "self"))
    statistic: str = parameter("max", choices=("max", "mean", "rms"))
    aggregate_group: str = parameter("mean", choices=("max", "mean"))
    mean_term: bool = parameter(False)
    values: str = parameter("none", choices=("none", "norm", "projected"))
    chunk: int = parameter(128, minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task == "self" and self.statistic == "rms":
            raise RecipeError(f"{self.name}: statistic='rms' needs a second pass: use task='context', or 'mean'.")

    @cached_property
    def traits(self) -> Traits:
        columns = AttentionColumns(_COLUMN[self.statistic]) if self.task == "self" else self._second_pass
        return Traits(needs=Needs(columns, *([OutputProjection()] if self.values == "projected" else [])))

    def score(self, observation: Observation) -> Scores:
        """Return equations 14 to 16."""
        received = self._received(observation)
        if self.values == "projected":
            received = received * OutputProjection().norms(observation, 2)
        grouped = observation.by_query_group(received)
        scores = grouped.amax(2) if self.aggregate_group == "max" else grouped.mean(2)
        if self.values == "norm":
            scores = scores * observation.values.float().norm(dim=-1)
        if self.mean_term:
            scores = scores + observation.mean_over_heads(scores)
        opening = observation[self._second_pass].opening if self.task == "repeat" else None
        if opening is None:
            return scores
        return scores.masked_fill(observation.positions < opening[:, None, None], float("inf"))

    @property
    def _second_pass(self) -> SecondPass:
        return SecondPass(frozenset({_COLUMN[self.statistic]}), self.chunk, repeat=self.task == "repeat")

    def _received(self, observation: Observation) -> QueryHeadScores:
        """Return equation 14."""
        column = _COLUMN[self.statistic]
        if self.task == "self":
            columns, tokens = observation[AttentionColumns(column)], observation.lengths
        else:
            received = observation[self._second_pass]
            columns, tokens = received.statistics[column], received.tokens
        if self.statistic == "max":
            return columns
        mean = columns / tokens[:, None, None]
        return torch.sqrt(mean) if self.statistic == "rms" else mean


_COLUMN = {"max": ColumnStatistic.MAX, "mean": ColumnStatistic.SUM, "rms": ColumnStatistic.SQUARE}
"""The column statistic that is streamed for each `statistic`."""
