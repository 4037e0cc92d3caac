"""Methods that ask the prompt itself: attention of a second pass, and of the prompt's queries moved behind it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from keepset.core.feature import Needs
from keepset.core.features.attention import AttentionColumns, PromptQueryAttention, SecondPass
from keepset.core.features.runtime_features import OutputProjection
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import QueryHeadScores, Scores
from keepset.core.traits import Traits
from keepset.errors import RecipeError
from keepset.kernels.columns import ColumnStatistic

_WEIGHT = 0.5
_COLUMN = {"max": ColumnStatistic.MAX, "mean": ColumnStatistic.SUM, "rms": ColumnStatistic.SQUARE}
"""The column statistic that is streamed for each `statistic`."""


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


_SECOND_PASS = SecondPassAttention(statistic="rms", chunk=0)


@dataclass(frozen=True)
class PromptQueries(Method):
    """Keeps what the prompt's own queries would attend to if they came once more, right after it.

    Their rotation is undone and replaced by that of the first position after the prompt. From there every query sees
    every entry, later ones included. An entry's score is the root of the mean square of the attention that they pay to
    it, averaged over the query heads that share its KV head. This approximates a second pass: it computes attention's
    products, and nothing else of the model.

    The method is keepset's own. `expected_attention` (arXiv:2510.00636) uses a Gaussian of these queries instead of the
    queries, and KVzip (arXiv:2505.23416) asks the model to repeat its prompt. It works because heads that continue a
    repetition find, by a token's own query, the entry that came after it. So whatever may come up again is kept, even
    if it came up only once so far. The mean of squares is the first-order effect that dropping an entry has on
    attention's output. A mean overrates what many queries attend to a little, and a maximum what one query attends to.

    With `second_pass=True` the prompt, or the questions that the cache was given, really run once more on top of its
    cache, as in `second_pass(statistic='rms')`. Half of the attention that they pay is added. Those queries know what
    they repeat, so they find facts that the text never comes back to; the queries of the first pass show what else is
    attended to. Either alone is worse at one of the two: docs/results.md.

    Attributes:
        stride: every `stride`-th token's query counts.
        second_pass: whether the prompt runs once more as well.
    """

    name = "prompt_queries"

    stride: int = parameter(1, minimum=1)
    second_pass: bool = parameter(False)

    @cached_property
    def traits(self) -> Traits:
        once_more = Needs(PromptQueryAttention(self.stride))
        needs = _SECOND_PASS.traits.needs | once_more if self.second_pass else once_more
        # 4 sinks as in StreamingLLM, and 8 neighbours, to which distant queries do not attend.
        return Traits(needs=needs, sinks=4, recent=8)

    def score(self, observation: Observation) -> Scores:
        scores = observation.by_query_group(observation[PromptQueryAttention(self.stride)].sqrt()).mean(2)
        return scores + _WEIGHT * _SECOND_PASS.score(observation) if self.second_pass else scores
