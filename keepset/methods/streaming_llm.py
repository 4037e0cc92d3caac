"""StreamingLLM: attention sinks and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.core.traits import Traits


@dataclass(frozen=True)
class StreamingLLM(Method):
    """Keeps the first tokens and the newest ones (Xiao et al. 2024, arXiv:2309.17453, section 3.2).

    There are four sinks, the paper's default; change them with the recipe's `sinks=`. Positions are not renumbered:
    entries keep the rotation with which they were cached.
    """

    name = "streaming_llm"
    paper = "arXiv:2309.17453"
    traits = Traits(sinks=4)

    def score(self, observation: Observation) -> Scores:
        return observation.positions.float()
