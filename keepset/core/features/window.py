"""`WindowAttention`: what every entry receives of the newest queries, added up while they pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.feature import Feature
from keepset.core.observation import Observation
from keepset.core.shapes import Scores


@dataclass(frozen=True, eq=False)
class WindowSums:
    """What entries received of a window of queries.

    Attributes:
        received: attention, the mean over the query group, summed over the window's queries, in float32.
        window, every: of how many queries, and after how many tokens there are events; 0 at the prompt's end.
        lengths, prompts: of the requests, as in the observation.
    """

    received: Scores
    window: int
    every: int
    lengths: Int[Tensor, " batch"]
    prompts: Int[Tensor, " batch"]

    def counted(self, positions: Int[Tensor, "batch kv_heads entries"]) -> Float[Tensor, "batch kv_heads entries"]:
        """How much the window's queries that have come since these positions count in all: at most `window`."""
        lengths, prompts = (part[:, None, None] for part in (self.lengths, self.prompts))
        age = (lengths - positions).clamp(min=0)
        if not self.every or self.every >= self.window:
            return age.clamp(max=self.window).float()
        of_prompt = positions < prompts
        events = torch.where(of_prompt, lengths - prompts, age) // self.every
        first = torch.where(of_prompt, (prompts - positions).clamp(max=self.window), age % self.every)
        return self.window - (self.window - first) * torch.pow(1 - self.every / self.window, events)


@dataclass(frozen=True)
class WindowAttention(Feature[WindowSums]):
    """Causal attention of the newest `window` queries, summed over them, by entry and KV head.

    At the prompt's end it is made of these queries. After it, it is added up while they pass, entry by entry, so that
    one number is held per entry and no query. Where events (`every=I`) come at least `window` tokens apart this is the
    same: nothing is dropped while a window passes. Where they come more often, a window would reach over events, to
    queries whose attention was paid to entries that are gone. Then everything counts as it was paid to the entries that
    there were, and fades: at each event the part I / `window` of what was counted goes, so that all that counts still
    weighs `window` queries. The newest I count fully, those before them 1 - I / `window`, and so on.

    Attributes:
        window: how many queries.
        history: they are asked about the entries before the window alone, and their attention there is all that counts.
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

    def faded(self, every: int) -> float:
        """How much of what was counted still counts after an event, where these are so many tokens apart."""
        return max(0.0, 1 - every / self.window)

    def of(self, observation: Observation) -> WindowSums:
        queries, at = observation.newest_queries(self.window)
        last_visible = self.last_visible(at, observation.lengths)
        received = observation.received(queries, last_visible, self.largest).mean(2)
        return WindowSums(received, self.window, 0, observation.lengths, observation.prompts)

    def last_visible(self, at: Int[Tensor, "batch n"], lengths: Int[Tensor, " batch"]) -> Int[Tensor, "batch n"]:
        """The last position that queries at these are asked about, for an event at these lengths."""
        return at.minimum(lengths[:, None] - self.window - 1) if self.history else at
