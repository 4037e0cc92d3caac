"""Scores of NaN: an answer comes all the same, and the log says once per method that nothing chose it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset import Observation, registry
from keepset.hf import cache
from keepset.methods.keys import Knorm
from tests.hf.models import generate, padded_prompt, tiny


@dataclass(frozen=True)
class Spoilt(Knorm):
    """Knorm, but for some entries."""

    name = "spoilt"

    first: int = keepset.parameter(6, minimum=0)
    last: int = keepset.parameter(8, minimum=0)

    def score(self, observation: Observation) -> Tensor:
        at = observation.positions
        return super().score(observation).masked_fill((at >= self.first) & (at <= self.last), torch.nan)


@pytest.fixture(autouse=True)
def spoilt() -> Iterator[None]:
    keepset.register(Spoilt)
    cache._say_once.cache_clear()
    yield
    cache._say_once.cache_clear()
    del registry._methods["spoilt"]


def run(text: str, name: str = "llama") -> Any:
    ids, mask = padded_prompt([0, 5], 30)
    past = keepset.Cache(tiny(name), text)
    generate(tiny(name), ids, past, mask, max_new_tokens=8)
    return past


@pytest.mark.parametrize(
    "text", ["spoilt(keep=12)", "spoilt(keep=24, every=4)", "adakv(spoilt, keep=12)", "pool(spoilt, keep=12)"]
)
def test_a_warning_once_for_each_method(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert run(text).keep_set is not None
    run(text)
    (said,) = caplog.messages
    method = keepset.Recipe.parse(text).text()
    assert said.startswith(f"keepset: {method} gives some entries scores of NaN, so nothing says which of them to keep")
    assert said.endswith(".") and "\n" not in said
    run("spoilt(last=9, keep=12)")
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("text", ["knorm(keep=12)", "spoilt(first=22, last=99, recent=8, keep=12)"])
def test_no_warning_where_no_comparison_fails(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """What always stays is compared with nothing."""
    run(text)
    assert caplog.messages == []
