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
    """Keeps what the prompt's own queries would look at if they came once more, right after it.

    Their rotation is undone and made again for the first position after the prompt. From there every query sees every
    entry, the later ones included. An entry's score is the root of the mean square of the attention that they pay to
    it, averaged over the query heads that share its KV head. This is a second pass without the pass: it computes
    attention's products, and nothing else of the model.

    The method is keepset's own. `expected_attention` (arXiv:2510.00636) takes a Gaussian of these queries instead of
    the queries themselves, and KVzip (arXiv:2505.23416) asks the model to repeat its prompt. It works because heads
    that continue a repetition find, by a token's own query, the entry that came after it. So whatever comes up again is
    kept, even if it has come up only once so far. The mean of squares is the first-order effect that dropping an entry
    has on attention's output. A mean alone overrates what everyone looks at a little, and a maximum what one query
    looks at once.

    With `second_pass=True` the prompt really comes once more, on top of its own cache (or the questions do that the
    cache was given), as in `second_pass(statistic='rms')`. Half of the attention that is paid then is added. Those
    queries know what they repeat, which finds facts that the text never comes back to; the queries of the first pass
    still tell what is looked at otherwise. Either alone is worse at one of the two: docs/results.md.

    Attributes:
        stride: one of this many tokens is asked.
        second_pass: whether the prompt runs once more as well.
    """

    name = "prompt_queries"

    stride: int = parameter(1, minimum=1)
    second_pass: bool = parameter(False)

    @cached_property
    def traits(self) -> Traits:
        once_more = Needs(PromptQueryAttention(self.stride))
        needs = _SECOND_PASS.traits.needs | once_more if self.second_pass else once_more
        # 4 sinks as in StreamingLLM; and 8 neighbours, which queries that ask from afar do not show.
        return Traits(needs=needs, sinks=4, recent=8)

    def score(self, observation: Observation) -> Scores:
        scores = observation.by_query_group(observation[PromptQueryAttention(self.stride)].sqrt()).mean(2)
        return scores + _WEIGHT * _SECOND_PASS.score(observation) if self.second_pass else scores
