"""PromptQueries: what the prompt's own queries would look at if they came once more, right after it."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.feature import Needs
from keepset.core.features.attention import PromptQueryAttention
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.methods.second_pass import SecondPassAttention

_AGAIN = SecondPassAttention(statistic="rms", chunk=0)
_WEIGHT = 0.5


@dataclass(frozen=True)
class PromptQueries(Method):
    """Keeps what the prompt's own queries would look at if they came once more, right after it.

    Their rotation is undone and made again for the first position after the prompt; from there every one of them
    sees every entry, the later ones included. An entry's score is the root of the mean square of what they pay to
    it, averaged over the query heads that share its KV head. This is a second pass without the pass: attention's
    products, and nothing else of the model.

    It is keepset's own. `expected_attention` (arXiv:2510.00636) asks a Gaussian of these queries instead of
    themselves, and KVzip (arXiv:2505.23416) the model to repeat its prompt. Why it works: heads that continue a
    repetition find, by a token's own query, the entry that came after it. So whatever comes up again is there, even
    if it has come up only once so far. The mean of squares is what dropping an entry does to attention's output, to
    first order; a mean alone overrates what everyone looks at a little, a maximum what one looks at once.

    With `second_pass=True` the prompt really comes once more, on top of its own cache (or the questions come that the
    cache was given), as in `second_pass(statistic='rms')`, and half of what is paid then is added. Now queries know
    what they repeat, which finds facts that nobody comes back to; those of the first pass still tell what is looked at
    otherwise. Either alone is worse in one of both: docs/results.md.

    Attributes:
        stride: of so many tokens one is asked.
        second_pass: whether the prompt runs once more, too.
    """

    name = "prompt_queries"
    sinks = 4  # as in StreamingLLM
    recent = 8  # neighbours, which no token asked from afar shows

    stride: int = parameter(1, minimum=1)
    second_pass: bool = parameter(False)

    @property
    def needs(self) -> Needs:
        once_more = Needs(PromptQueryAttention(self.stride))
        return _AGAIN.needs | once_more if self.second_pass else once_more

    def score(self, observation: Observation) -> Scores:
        scores = observation.by_query_group(observation[PromptQueryAttention(self.stride)].sqrt()).mean(2)
        return scores + _WEIGHT * _AGAIN.score(observation) if self.second_pass else scores
