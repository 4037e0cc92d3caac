"""Recipes that look across layers, at the attention of the whole prompt, or at hidden states: as under transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.vllm.compared import CHUNKED, answers_of, asks, check_oracle, check_transformers, result
from tests.vllm.engine import Ask, Scenario
from tests.vllm.oracle import Oracle

pytestmark = pytest.mark.full

ONCE = ["gvote", "kvcompose(task='self', keep=0.25)", "glance(keep=0.25)"]
"""Undisturbed."""
AGAIN = {
    "h2o(keep=0.3)": {"enable_prefix_caching": True},
    "pool(snapkv(window=16), keep=80, every=24)": {},
}
"""Preempted, and asked the same once more."""
TOKENS = 64


@pytest.fixture(scope="module")
def prompts(essay: list[int]) -> list[Ask]:
    return asks(essay, (300, 150, 517), TOKENS)


@pytest.fixture(scope="module")
def repeated(prompts: list[Ask]) -> list[Ask]:
    return [*prompts, Ask(prompts[0].ids, TOKENS, add=30)]


@pytest.fixture(scope="module")
def engines(prompts: list[Ask], repeated: list[Ask], shallow: Path) -> dict[str, Any]:
    engine = CHUNKED | {"model": str(shallow)}
    once = {recipe: Scenario(recipe, prompts, engine=engine) for recipe in ONCE}
    again = {recipe: Scenario(recipe, repeated, preempt=[12], engine=engine | own) for recipe, own in AGAIN.items()}
    return answers_of(once | again)


@pytest.mark.parametrize("recipe", [*ONCE, *AGAIN])
def test_it_is_the_reference(
    recipe: str, engines: dict[str, Any], prompts: list[Ask], repeated: list[Ask], shallow_oracle: Oracle
) -> None:
    engine = result(engines, recipe)
    check_oracle(shallow_oracle, recipe, repeated if recipe in AGAIN else prompts, engine)
    assert all(engine.events) and not any(event["left"] for events in engine.events for event in events)
    assert engine.stats["blocks_freed"] > 0


@pytest.mark.parametrize("recipe", ONCE)
def test_it_is_the_transformers_runtime(
    recipe: str, engines: dict[str, Any], prompts: list[Ask], shallow_model: PreTrainedModel
) -> None:
    check_transformers(shallow_model, recipe, prompts, result(engines, recipe))


@pytest.mark.parametrize("recipe", AGAIN)
def test_preempted_requests_see_their_whole_prompt_again(recipe: str, engines: dict[str, Any]) -> None:
    engine = result(engines, recipe)
    assert sum(engine.preemptions) == 3
    assert not any(engine.cached)  # of shared pages it would not see the queries
