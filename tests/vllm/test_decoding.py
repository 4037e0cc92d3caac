"""While decoding: token for token, and entry for entry, what an engine keeps is what transformers keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import keepset
from tests.vllm.compared import CHUNKED, answers_of, asks, check_oracle, check_transformers, fed, result
from tests.vllm.engine import Ask, Scenario, layers_of
from tests.vllm.oracle import Oracle

pytestmark = pytest.mark.full

SHORT_TOO = (200, 60, 280, 110)
EVERY = [
    "snapkv(window=16, keep=96, every=24)",
    "tova(keep=110, prefill=False, every=20)",
    "expected_attention(keep=64, buffer=40, every=24)",
    "expected_attention(keep=64, buffer=60, every=48)",  # moments weigh less than their queries
    "r_kv(keep=96, every=5)",
    "adakv(snapkv(window=16), keep=96, every=17)",
    "pyramid(snapkv(window=16), keep=128, every=6)",
    "mass(share=0.8, every=24)",
    "loud(keep=80, every=16)",
    "snapkv(window=16, keep=96, every=24, protect_prompt=True)",
]
AMS = ["ams(tova, keep=96, every=4)", "ams(expected_attention(buffer=64), keep=96, every=4)"]
LONG = "snapkv(window=16, keep=96, every=64)"


@pytest.fixture(scope="module")
def decoding(essay: list[int], shallow: Path) -> dict[str, Any]:
    some, engine = asks(essay, SHORT_TOO, 75), CHUNKED | {"model": str(shallow)}
    return answers_of({recipe: Scenario(recipe, some, engine=engine) for recipe in EVERY})


@pytest.fixture(scope="module")
def reasoning(essay: list[int], shallow: Path, tiny: Path) -> dict[str, Any]:
    """Long generations that live on what they keep."""
    engine = {"model": str(shallow)}
    scenarios = {recipe: Scenario(recipe, thoughts(essay), engine=engine | CHUNKED, layer_groups=2) for recipe in AMS}
    return answers_of(scenarios | {LONG: Scenario(LONG, [long()], engine={"model": str(tiny)})})


def thoughts(essay: list[int]) -> list[Ask]:
    return asks(essay, (70, 150, 310), 128)


def long() -> Ask:
    ids = torch.randint(3, 512, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    return Ask(ids, 512)


@pytest.mark.parametrize("recipe", EVERY)
def test_while_decoding_it_is_the_reference(
    recipe: str, decoding: dict[str, Any], essay: list[int], shallow_oracle: Oracle
) -> None:
    engine = result(decoding, recipe)
    assert all(engine.events)
    check_oracle(shallow_oracle, recipe, asks(essay, SHORT_TOO, 75), engine)


@pytest.mark.parametrize("recipe", EVERY)
def test_while_decoding_it_is_the_transformers_runtime(
    recipe: str, decoding: dict[str, Any], essay: list[int], shallow_model: PreTrainedModel
) -> None:
    # Under vLLM events do not exist that drop nothing, of which loud remembers what it saw, nor those of ragged heads
    # that drop less than a block: docs/serving.md, Limits. The first of these prompts is shorter than the budget.
    places = [2] if recipe.startswith(("loud", "adakv")) else [1, 2]
    check_transformers(shallow_model, recipe, asks(essay, SHORT_TOO, 75), result(decoding, recipe), places)


@pytest.mark.parametrize("recipe", AMS)
def test_ams_over_long_generations(
    recipe: str, reasoning: dict[str, Any], essay: list[int], shallow_model: PreTrainedModel
) -> None:
    """Token for token; and the same entries but for near ties, of which hundreds of events of heads have some.

    Quotas are rounded and masses summed up, so a last bit can move an entry's fate; what is gone stays gone.
    """
    engine = result(reasoning, recipe)
    engine.check_nothing_left()
    compared = 0
    for index, ask in enumerate(thoughts(essay)):
        cache, tokens = keepset.Cache(shallow_model, recipe, history=True), engine.tokens[index]
        assert tokens is not None and len(engine.events[index]) >= 15
        assert fed(shallow_model, cache, cache.recipe, ask.ids, tokens) == tokens
        same = []
        for event, other in zip(cache.events[-len(engine.events[index]) :], engine.events[index], strict=True):
            assert event.length == other["at"] and event.keep_set is not None
            for layer, heads in layers_of(other).items():
                for head, positions in enumerate(heads):
                    mine = event.keep_set.positions(layer, 0, head).tolist()
                    assert len(mine) == len(positions) == 96
                    same.append(mine == positions)
        assert sum(same) > 0.98 * len(same)
        compared += len(same)
    assert compared > 750


def test_a_long_generation_stays_small(reasoning: dict[str, Any], tiny_oracle: Oracle) -> None:
    recipe = LONG
    engine = result(reasoning, recipe)
    check_oracle(tiny_oracle, recipe, [long()], engine)
    assert [event["at"] for event in engine.events[0]] == list(range(200, 712, 64))
    used = [engine.free_before - step["free"] for step in engine.steps]
    # 96 kept, at most 64 new ones, and what they lie in the middle of; the prompt itself took 7.
    assert max(used[2:]) <= 6 and used[0] == 7
