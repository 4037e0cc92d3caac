"""StreamingLLM: attention sinks and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.core.shapes import Scores


@dataclass(frozen=True)
class StreamingLLM(Method):
    """Keeps the first tokens and the newest ones (Xiao et al. 2024, arXiv:2309.17453, section 3.2).

    Four sinks, the paper's default; change them with the recipe's `sinks=`. Positions are not renumbered:
    entries keep the rotation with which they were cached.
    """

    name: ClassVar[str] = "streaming_llm"
    paper: ClassVar[str] = "arXiv:2309.17453"

    sinks: ClassVar[int] = 4
    """The paper's four."""

    def score(self, observation: Observation) -> Scores:
        """The later, the better."""
        return observation.positions.float()
