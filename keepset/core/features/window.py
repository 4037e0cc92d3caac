"""`WindowAttention`: what every entry receives of the newest queries, added up while they pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Int
from torch import Tensor

from keepset.core.feature import Feature
from keepset.core.observation import Observation
from keepset.core.shapes import Scores


@dataclass(frozen=True, eq=False)
class WindowSums:
    """What entries received of a window of queries.

    Attributes:
        received: attention, the mean over the query group, summed over the window's queries, in float32.
        window: of how many queries; of fewer where a request is shorter.
    """

    received: Scores
    window: int

    @property
    def mean(self) -> Scores:
        """Received of a query on average; those that a short request does not have give nothing."""
        return self.received / self.window

    def asked(
        self,
        observation: Observation,
        positions: Int[
            Tensor,
            (
                batch  # kv_heads #entries
            ),
        ],
    ) -> Int[
        Tensor,
        (
            batch  # kv_heads #entries
        ),
    ]:
        """How many of the window's queries have come since these positions, with their own."""
        return (observation.lengths[:, None, None] - positions).clamp(0, self.window)


@dataclass(frozen=True)
class WindowAttention(Feature[WindowSums]):
    """Causal attention of the newest `window` queries, summed over them, by entry and KV head.

    At the prompt's end it is made of these queries. After it, it is added up while they pass, entry by entry: one
    number is held per entry and hardly a query. A window reaches no further back than the event before: where these
    come at least `window` tokens apart nothing is dropped while it passes, and the sums are those that the queries
    would give at the event. Where they come more often (`every=I`), the newest I queries are the window.

    Attributes:
        window: how many queries.
        history: they are asked about the entries before the newest `window` alone, and their attention there is all
            that counts.
        largest: of the logits of the query heads that share a KV head the largest counts, instead of the mean of their
            attention.
    """

    summed = True

    window: int = field()
    history: bool = False
    largest: bool = False

    @property
    def name(self) -> str:
        return f"window of {self.window} queries"

    @property
    def column(self) -> str:
        """What the numbers of entries are stored under; no name of a method's own."""
        return f"received of {self.window}{', before it' * self.history}{', by the largest' * self.largest}"

    def of(self, observation: Observation) -> WindowSums:
        return self.made(observation, self.window)

    def made(self, observation: Observation, window: int) -> WindowSums:
        """Of the newest `window` of the observation's queries."""
        queries, at = observation.newest_queries(window)
        last_visible = self.last_visible(at, observation.lengths)
        return WindowSums(observation.received(queries, last_visible, self.largest).mean(2), window)

    def last_visible(self, at: Int[Tensor, "batch n"], lengths: Int[Tensor, " batch"]) -> Int[Tensor, "batch n"]:
        """The last position that queries at these are asked about, for an event at these lengths."""
        return at.minimum(lengths[:, None] - (self.window + 1)) if self.history else at
