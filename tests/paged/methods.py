"""Methods that only tests know; importing this registers them, also in an engine's processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from keepset.core.budget import Budget
from keepset.core.feature import Needs
from keepset.core.features.recent_queries import RecentQueries
from keepset.core.keep_set import KeepSet
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.registry import register


@register
@dataclass(frozen=True)
class Mass(Method):
    """Keeps what received this share of the window's attention: how many that is, only the data say."""

    name: ClassVar[str] = "mass"
    paper: ClassVar[str] = "none"
    layout: ClassVar[str] = "head-ragged"
    needs_budget: ClassVar[bool] = False
    counts_from_data: ClassVar[bool] = True

    share: float = parameter(0.9, minimum=0.0, maximum=1.0)
    window: int = parameter(16, minimum=1)

    @property
    def needs(self) -> Needs:
        return Needs(RecentQueries(self.window))

    @property
    def recent(self) -> int:
        return self.window

    def score(self, observation: Observation) -> Tensor:
        return observation.by_query_group(observation.window_attention(self.window)).mean((2, 3))

    def select(self, observation: Observation, budget: Budget) -> KeepSet:
        scores = self.score(observation).masked_fill(~observation.valid, 0.0)
        best, order = scores.sort(dim=-1, descending=True, stable=True)
        enough = best.cumsum(-1) - best >= self.share
        mask = (~enough).new_zeros(enough.shape).scatter(-1, order, ~enough)
        return observation.keep(mask | budget.is_recent(observation))


@register
@dataclass(frozen=True)
class Loud(Method):
    """Keeps entries of large values that the newest queries look at, and remembers for how long they stayed."""

    name: ClassVar[str] = "loud"
    paper: ClassVar[str] = "none"

    window: int = parameter(8, minimum=1)

    @property
    def needs(self) -> Needs:
        return Needs(RecentQueries(self.window))

    @property
    def recent(self) -> int:
        return self.window

    def score(self, observation: Observation) -> Tensor:
        stayed = observation.state.get("stayed")
        stayed = observation.keys.new_zeros(observation.valid.shape) if stayed is None else stayed
        attention = observation.by_query_group(observation.window_attention(self.window)).amax((2, 3))
        return attention * observation.values.float().norm(dim=-1) * (1 + stayed)

    def remember(self, observation: Observation, scores: Tensor) -> dict[str, Tensor]:
        return {"stayed": observation.state.get("stayed", torch.zeros_like(scores)) + 1}


@register
@dataclass(frozen=True)
class Dated(Method):
    """Keeps what an entry's original position alone says, in no order: one that is off by one changes everything."""

    name: ClassVar[str] = "dated"
    paper: ClassVar[str] = "none"

    def score(self, observation: Observation) -> Tensor:
        heads = torch.arange(observation.positions.shape[1])[:, None]
        angles = (observation.positions * 12.9898 + heads + observation.layer).double()
        return angles.sin().mul(43758.5453).frac().abs().float()
