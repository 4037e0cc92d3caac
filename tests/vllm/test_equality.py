"""Token for token, and entry for entry: what an engine keeps is what transformers keep.

Engines run in one process after another; a test reads what its engine did.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.vllm.compared import CHUNKED, Embedded, answers_of, asks, check_oracle, check_transformers, result
from tests.vllm.conftest import LAYERS
from tests.vllm.engine import Ask, Result, Scenario, run
from tests.vllm.oracle import Oracle

pytestmark = pytest.mark.full

LENGTHS, TOKENS = (200, 280, 150, 330), 16
AFTER_PREFILL = [
    "streaming_llm(keep=96)",
    "random(keep=0.3)",
    "knorm(keep=133, sinks=2, recent=7)",
    "tova(keep=97)",
    "snapkv(window=16, keep=0.25)",
    "expected_attention(keep=96)",
    "pyramid(snapkv(window=16), keep=128)",
    "adakv(snapkv(window=16), keep=96)",
    "adakv(expected_attention, keep=0.2)",
    "mass(share=0.8)",
    "loud(keep=80)",
]
WHOLE = ["snapkv(window=16, keep=0.25)", "adakv(snapkv(window=16), keep=96)"]
"""Recipes for the whole model, too, one of each layout; else its first layers will do, and are quicker."""
UNTOUCHED = ["snapkv(window=16, keep=1024, every=16)", "adakv(knorm, keep=1.0)"]

# Equal tokens have keys of equal norms in the first layer, up to rounding, so that rounding alone would choose.
DISTINCT = "knorm(keep=133, sinks=2, recent=7)"


def asks_of(recipe: str | None, prompts: list[Ask]) -> list[Ask]:
    if recipe != DISTINCT:
        return prompts
    ids = torch.randperm(sum(LENGTHS), generator=torch.Generator().manual_seed(6)).tolist()
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    return [Ask(ids[start : start + length], TOKENS) for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def prompts(essay: list[int]) -> list[Ask]:
    return asks(essay, LENGTHS, TOKENS)


@pytest.fixture(scope="module")
def engines(prompts: list[Ask], shallow: Path) -> dict[str, Any]:
    few = CHUNKED | {"model": str(shallow)}
    scenarios = {recipe: Scenario(recipe, asks_of(recipe, prompts), engine=few) for recipe in AFTER_PREFILL}
    scenarios |= {recipe: Scenario(recipe, prompts, engine=few) for recipe in UNTOUCHED}
    scenarios["none"] = Scenario(None, prompts, engine=few)
    return answers_of(scenarios)


@pytest.fixture(scope="module")
def plain(prompts: list[Ask], shallow: Path) -> Result:
    """vLLM alone."""
    alone = Scenario(None, prompts, engine=CHUNKED | {"model": str(shallow)})
    return result(answers_of({"": alone}, env={"VLLM_PLUGINS": ""}), "")


@pytest.mark.parametrize("recipe", AFTER_PREFILL)
def test_after_prefill_it_is_the_reference(
    recipe: str, engines: dict[str, Any], prompts: list[Ask], shallow_oracle: Oracle
) -> None:
    engine = result(engines, recipe)
    assert engine.classes == ["CPUKeepImpl"]
    assert [len(events) for events in engine.events] == [1] * len(prompts)
    assert not any(event["left"] for events in engine.events for event in events)
    assert max(tokens for log in engine.log for _, _, tokens in log) < max(LENGTHS)  # in chunks
    check_oracle(shallow_oracle, recipe, asks_of(recipe, prompts), engine)


@pytest.mark.parametrize("recipe", AFTER_PREFILL)
def test_after_prefill_it_is_the_transformers_runtime(
    recipe: str, engines: dict[str, Any], prompts: list[Ask], shallow_model: PreTrainedModel
) -> None:
    check_transformers(shallow_model, recipe, asks_of(recipe, prompts), result(engines, recipe))


@pytest.mark.parametrize("recipe", WHOLE)
def test_all_layers_of_the_model(recipe: str, text: list[int], embedded: Embedded, oracle: Oracle) -> None:
    ask = Ask(text[:128], 8)
    (engine,) = run(Scenario(recipe, [ask]))
    check_oracle(oracle, recipe, [ask], engine)
    check_transformers(embedded[0], recipe, [ask], engine)
    assert len(engine.events[0]) == 1 and len(engine.events[0][0]["layers"]) == embedded[0].config.num_hidden_layers


def test_without_a_recipe_it_is_vllm(engines: dict[str, Any], plain: Result) -> None:
    engine = result(engines, "none")
    assert engine.classes == plain.classes == ["CPUAttentionBackendImpl"]
    assert engine.tokens == plain.tokens
    assert engine.log == plain.log
    assert engine.steps == plain.steps
    assert not any(engine.stats.values())


def test_vllm_is_transformers(plain: Result, prompts: list[Ask], shallow_oracle: Oracle) -> None:
    check_oracle(shallow_oracle, None, prompts, plain)


@pytest.mark.parametrize("recipe", UNTOUCHED)
def test_where_everything_may_stay_nothing_changes(recipe: str, engines: dict[str, Any], plain: Result) -> None:
    engine = result(engines, recipe)
    assert engine.classes == ["CPUKeepImpl"]
    assert engine.tokens == plain.tokens
    assert engine.steps == plain.steps
    assert not any(engine.events) and not any(engine.stats.values())
    engine.check_nothing_left()


def test_events_are_counted_once_each(engines: dict[str, Any]) -> None:
    engine = result(engines, "streaming_llm(keep=96)")
    layers, heads = LAYERS, 3
    assert engine.stats["events"] == len(LENGTHS)
    assert engine.stats["entries_kept"] == len(LENGTHS) * layers * heads * 96
    assert engine.stats["entries_dropped"] == sum(length - 96 for length in LENGTHS) * layers * heads
    assert engine.stats["blocks_freed"] == sum((length - 96) // 32 for length in LENGTHS)
    assert engine.stats["seconds"] > 0
