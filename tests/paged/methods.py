"""Methods that only tests of paged caches know: other tests run over all methods that are registered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from keepset import registry
from keepset.core.budget import Budget
from keepset.core.feature import Needs
from keepset.core.features.runtime_features import EntryBiases, RecentQueries
from keepset.core.keep_set import KeepSet
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.traits import Traits, combine
from keepset.kernels.packed import BIAS
from keepset.methods.window import SnapKV


@dataclass(frozen=True)
class Mass(Method):
    """Keeps what received this share of the window's attention: how many that is, only the data say."""

    name: ClassVar[str] = "mass"
    paper: ClassVar[str] = "none"

    share: float = parameter(0.9, minimum=0.0, maximum=1.0)
    window: int = parameter(16, minimum=1)

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            needs=Needs(RecentQueries(self.window)), recent=self.window, equal_heads=False, needs_budget=False,
            counts_from_data=True,
        )  # fmt: skip

    def score(self, observation: Observation) -> Tensor:
        return observation.by_query_group(observation.window_attention(self.window)).mean((2, 3))

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        return KeepSet([self._kept(each, budget).layer(each.layer_ids[0]) for each in observations])

    def _kept(self, observation: Observation, budget: Budget) -> KeepSet:
        scores = self.score(observation).masked_fill(~observation.valid, 0.0)
        best, order = scores.sort(dim=-1, descending=True, stable=True)
        enough = best.cumsum(-1) - best >= self.share
        mask = (~enough).new_zeros(enough.shape).scatter(-1, order, ~enough)
        return observation.keep(mask | budget.is_recent(observation))


@dataclass(frozen=True)
class Loud(Method):
    """Keeps entries of large values that the newest queries look at, and remembers for how long they stayed."""

    name: ClassVar[str] = "loud"
    paper: ClassVar[str] = "none"

    window: int = parameter(8, minimum=1)

    @cached_property
    def traits(self) -> Traits:
        return Traits(needs=Needs(RecentQueries(self.window)), recent=self.window, state_names=("stayed",))

    def score(self, observation: Observation) -> Tensor:
        stayed = observation.state.get("stayed")
        stayed = observation.keys.new_zeros(observation.valid.shape) if stayed is None else stayed
        attention = observation.by_query_group(observation.window_attention(self.window)).amax((2, 3))
        return attention * observation.values.float().norm(dim=-1) * (1 + stayed)

    def remember(self, observation: Observation, scores: Tensor) -> dict[str, Tensor]:
        return {"stayed": observation.state.get("stayed", torch.zeros_like(scores)) + 1}


@dataclass(frozen=True)
class Leaning(SnapKV):
    """SnapKV whose entries get biases of whatever stays or came, which attention adds from then on."""

    name: ClassVar[str] = "leaning"
    paper: ClassVar[str] = "none"

    @cached_property
    def traits(self) -> Traits:
        return combine(Traits(needs=Needs(EntryBiases()), state_names=(BIAS,)), super().traits)

    def remember(self, observation: Observation, scores: Tensor) -> dict[str, Tensor]:
        return {BIAS: observation.state.get(BIAS, torch.zeros_like(scores)) + (observation.positions * 1.7).sin()}


@dataclass(frozen=True)
class Dated(Method):
    """Keeps what an entry's original position alone says, in no order: one that is off by one changes everything."""

    name: ClassVar[str] = "dated"
    paper: ClassVar[str] = "none"

    def score(self, observation: Observation) -> Tensor:
        heads = torch.arange(observation.positions.shape[1])[:, None]
        angles = (observation.positions * 12.9898 + heads + observation.indices[:, None, None]).double()
        return angles.sin().mul(43758.5453).frac().abs().float()


OWN = (Mass, Loud, Leaning, Dated)


def register() -> None:
    """Makes them known for good, in a process that runs nothing else."""
    for method in OWN:
        registry.register(method)


@contextmanager
def registered() -> Iterator[None]:
    """Register them while the context lasts."""
    with pytest.MonkeyPatch.context() as patch:
        for method in OWN:
            patch.setitem(registry._methods, method.name, method)
        yield
