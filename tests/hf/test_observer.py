"""Observers of a cache: what they are told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import keepset
from keepset import Budget, KeepSet, Observation, Recipe
from keepset.methods.window import TOVA
from tests.hf.models import generate, prompt, same_keep_set, tiny


@dataclass(frozen=True)
class Counting(TOVA):
    """Counts, in its state, the events that each entry has lived through."""

    name: ClassVar[str] = "counting"

    def remember(self, observation: Observation, scores: Tensor) -> dict[str, Tensor]:
        return {"seen": observation.state.get("seen", torch.zeros_like(scores)) + 1}


@dataclass(frozen=True)
class Together(Counting):
    """Decides for all layers at once."""

    name: ClassVar[str] = "together"
    traits = replace(TOVA.traits, across_layers=True)


@pytest.mark.parametrize("method", [Counting(), Together()], ids=["layer by layer", "across layers"])
def test_observer_sees_what_the_method_saw(method: TOVA) -> None:
    model, ids = tiny("llama"), prompt(2, 20)
    recipe = Recipe.of(method, keep=12, every=5)
    told: list[tuple[Observation, KeepSet]] = []

    def observer(observation: Observation, budget: Budget, keep_set: KeepSet) -> None:
        assert budget == recipe.budget
        told.append((observation, keep_set))

    cache = keepset.Cache(model, recipe, history=True, observer=observer)
    tokens: Any = generate(model, ids, cache, max_new_tokens=12).sequences
    layers = cache.compressed_layers
    assert [event.length for event in cache.events] == [20, 25, 30]
    assert [observation.layer for observation, _ in told] == list(layers) * 3
    for number, event in enumerate(cache.events):
        part = told[number * len(layers) : (number + 1) * len(layers)]
        for layer, (observation, keep_set) in zip(layers, part, strict=True):
            assert observation.lengths.tolist() == [event.length] * 2
            kept = keep_set.layer(layer).to_record()
            assert event.keep_set is not None
            assert same_keep_set(KeepSet([kept]), KeepSet([event.keep_set.layer(layer)]))
            # As it was before the event: what is new has no number yet.
            state = observation.state.get("seen")
            if number == 0:
                assert state is None
            else:
                assert state is not None and int(state.max()) == number
                assert observation.keys.shape[2] == 17

    alone = keepset.Cache(model, recipe, history=True)
    assert torch.equal(generate(model, ids, alone, max_new_tokens=12).sequences, tokens)
    for a, b in zip(alone.events, cache.events, strict=True):
        assert a.keep_set is not None and b.keep_set is not None
        assert same_keep_set(a.keep_set, b.keep_set)
