"""Engines in several processes, ranks that share heads, and a scheduler that runs ahead."""

from __future__ import annotations

from typing import Any

import pytest

from keepset import Recipe
from tests.vllm.engine import Ask, Result, Scenario, run
from tests.vllm.oracle import Oracle

RECIPES = ["snapkv(window=16, keep=96, every=24)", "mass(share=0.8, every=24)"]
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
AHEAD = ENGINE | {
    "max_num_batched_tokens": 128,
    "async_scheduling": True,
    "num_gpu_blocks_override": 64,
    "max_model_len": 1024,
}


def asks(text: list[int]) -> list[Ask]:
    return [Ask(text[137 * i : 137 * i + n], 60) for i, n in enumerate((300, 60, 517))]


def whole(ask: Ask, chunk: int = 256) -> list[tuple[int, int]]:
    """Steps of a request, where nobody saw the engine's: chunks of a prompt make no difference."""
    prompt = [(start, min(chunk, len(ask.ids) - start)) for start in range(0, len(ask.ids), chunk)]
    return prompt + [(len(ask.ids) + more, 1) for more in range(ask.max_tokens - 1)]


def check(oracle: Oracle, recipe: str, some: list[Ask], engine: Result) -> None:
    for index, ask in enumerate(some):
        tokens = engine.tokens[index]
        assert tokens is not None and len(tokens) == ask.max_tokens
        steps = engine.steps_of(index) if engine.log else whole(ask)
        replay = oracle.replay(Recipe.parse(recipe), ask.ids, tokens, steps)
        assert replay.best == tokens
        assert replay.events
        if engine.events and any(engine.events):
            assert engine.events_of(index) == replay.events


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_scheduler_and_a_worker_in_other_processes(recipe: str, essay: list[int], oracle: Oracle) -> None:
    some = asks(essay)
    (engine,) = run(Scenario(recipe, some, engine=ENGINE), env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert not engine.log  # nobody watched
    check(oracle, recipe, some, engine)
    assert engine.stats["events"] > 0 and engine.stats["blocks_freed"] > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_that_share_the_heads(recipe: str, essay: list[int], oracle: Oracle) -> None:
    some = asks(essay)
    engine = run(
        Scenario(recipe, some, engine=ENGINE | {"tensor_parallel_size": 3}),
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )[0]
    check(oracle, recipe, some, engine)
    events = sum(
        len(oracle_events(oracle, recipe, ask, tokens)) for ask, tokens in zip(some, engine.tokens, strict=True)
    )
    assert engine.stats["events"] == events  # one rank's count
    engine.check_nothing_left()


def oracle_events(oracle: Oracle, recipe: str, ask: Ask, tokens: list[int] | None) -> list[Any]:
    return oracle.replay(Recipe.parse(recipe), ask.ids, tokens or [], whole(ask)).events


def test_a_scheduler_that_runs_ahead(essay: list[int], oracle: Oracle) -> None:
    """It plans a step before it knows the outcome of the one before."""
    some = asks(essay)
    engines = run(*(Scenario(recipe, some, engine=AHEAD, stub_streams=True) for recipe in RECIPES))
    for recipe, engine in zip(RECIPES, engines, strict=True):
        check(oracle, recipe, some, engine)
        engine.check_nothing_left()
