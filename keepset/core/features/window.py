"""`WindowAttention`: what every entry receives of the newest queries, added up while they pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.feature import Feature
from keepset.core.observation import Observation
from keepset.kernels.group_reduction import GroupReduction


@dataclass(frozen=True, eq=False)
class WindowSums:
    """What entries received of a window of queries.

    Attributes:
        attention_sums: attention summed over the window's queries, in float32; of each query head of a group, where the
            feature says so.
        window: of how many queries; of fewer where a request is shorter.
    """

    attention_sums: Float[Tensor, "batch kv_heads entries *group"]
    window: int

    @property
    def mean(self) -> Float[Tensor, "batch kv_heads entries *group"]:
        """Received of a query on average; those that a short request does not have give nothing."""
        return self.attention_sums / self.window

    def asked(
        self, observation: Observation, positions: Int[Tensor, "batch #kv_heads #entries"]
    ) -> Int[Tensor, "batch #kv_heads #entries"]:
        """How many of the window's queries have come since these positions, with their own."""
        return (observation.lengths[:, None, None] - positions).clamp(0, self.window)


@dataclass(frozen=True)
class WindowAttention(Feature[WindowSums]):
    """Causal attention of the newest `window` queries, summed over them, by entry and KV head.

    At the prompt's end it is made of these queries. After it, it is added up while they pass, entry by entry: numbers
    are held of entries and hardly a query. A window reaches no further back than the event before: where these
    come at least `window` tokens apart nothing is dropped while it passes, and the sums are those that the queries
    would give at the event. Where they come more often (`every=I`), the newest I queries are the window.

    Attributes:
        window: how many queries.
        history: they are asked about the entries before the newest `window` alone, and their attention there is all
            that counts.
        sums_of: what is added up of the query heads that share a KV head.
    """

    summed = True

    window: int = field()
    history: bool = False
    sums_of: GroupReduction = GroupReduction.MEAN

    @property
    def name(self) -> str:
        return f"window of {self.window} queries"

    @property
    def column(self) -> str:
        """What the numbers of entries are stored under; no name of a method's own."""
        rule = {
            GroupReduction.MEAN: "",
            GroupReduction.EACH: ", by each head",
            GroupReduction.LARGEST: ", by the largest",
        }
        return f"received of {self.window}{', before it' * self.history}{rule[self.sums_of]}"

    def of(self, observation: Observation) -> WindowSums:
        return self.made(observation, self.window)

    def made(self, observation: Observation, window: int) -> WindowSums:
        """Of the newest `window` of the observation's queries."""
        queries, at = observation.newest_queries(window)
        last_visible = self.last_visible(at, observation.lengths)
        return WindowSums(self.sums_of.of(observation.attention_sums(queries, last_visible, self.sums_of)), window)

    def last_visible(self, at: Int[Tensor, "batch n"], lengths: Int[Tensor, " batch"]) -> Int[Tensor, "batch n"]:
        """The last position that queries at these are asked about, for an event at these lengths."""
        return at.minimum(lengths[:, None] - (self.window + 1)) if self.history else at
