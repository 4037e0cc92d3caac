"""PromptQueries: keep what the prompt's own queries would attend to if they came once more, right after it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from keepset.core.feature import Needs
from keepset.core.features.attention import PromptQueryAttention
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.core.traits import Traits
from keepset.methods.second_pass import SecondPassAttention

_SECOND_PASS = SecondPassAttention(statistic="rms", chunk=0)
_WEIGHT = 0.5


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
