"""`WindowAttention`: the attention that entries receive from the newest queries, summed while these come."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.feature import Feature
from keepset.core.observation import Observation
from keepset.kernels.softmax import GroupReduction


@dataclass(frozen=True, eq=False)
class WindowSums:
    """Attention that entries received from a window of queries.

    Attributes:
        attention_sums: summed over the window's queries, float32; per query head if the feature says so.
        window: how many queries; queries that a shorter request lacks count as zero.
    """

    attention_sums: Float[Tensor, "batch kv_heads entries *group"]
    window: int


@dataclass(frozen=True)
class WindowAttention(Feature[WindowSums]):
    """Causal attention of the newest `window` queries, summed over them, for each entry and KV head.

    At the prompt's end it is computed from these queries. After the prompt it is summed per entry while the queries
    come, so that hardly a query is stored. A window reaches no further back than the event before. If events are at
    least `window` tokens apart, nothing is dropped during the window, and the sums equal those that the queries would
    give at the event. If events come more often (`every=I`), the window is the newest I queries.

    Attributes:
        window: how many queries.
        history: whether only attention to entries before the newest `window` tokens counts, by a softmax over these.
        sums_of: how to reduce the query heads that share a KV head.
    """

    summed = True

    window: int = field()
    history: bool = False
    sums_of: GroupReduction = GroupReduction.MEAN

    @property
    def name(self) -> str:
        return f"window of {self.window} queries"

    @cached_property
    def column(self) -> str:
        """The name of the column that holds the sums; no method's own column has such a name."""
        rule = {
            GroupReduction.MEAN: "",
            GroupReduction.EACH: ", by each head",
            GroupReduction.LARGEST: ", by the largest",
        }
        return f"received of {self.window}{', before it' * self.history}{rule[self.sums_of]}"

    def of(self, observation: Observation) -> WindowSums:
        return self.made(observation, self.window)

    def made(self, observation: Observation, window: int) -> WindowSums:
        """Return the sums over the newest `window` queries of an observation."""
        queries, at = observation.newest_queries(window)
        last_visible = self.last_visible(at, observation.lengths)
        return WindowSums(self.sums_of.of(observation.attention_sums(queries, last_visible, self.sums_of)), window)

    def last_visible(self, at: Int[Tensor, "batch n"], lengths: Int[Tensor, " batch"]) -> Int[Tensor, "batch n"]:
        """Return the last position that each query sees at an event where requests have so many tokens."""
        return at.minimum(lengths[:, None] - (self.window + 1)) if self.history else at
