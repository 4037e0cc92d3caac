"""Engines in several processes, ranks that share heads, and a scheduler that runs ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepset import Recipe
from tests.vllm.compared import answers_of, result
from tests.vllm.conftest import TINY
from tests.vllm.engine import Ask, Result, Scenario, run
from tests.vllm.oracle import Oracle, Replay
from tests.vllm.test_life import IDS

pytestmark = pytest.mark.full

RECIPES = ["snapkv(window=16, keep=96, every=24)", "mass(share=0.8, every=24)"]
SHARED = [*RECIPES, "gvote"]
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
AHEAD = ENGINE | {
    "max_num_batched_tokens": 128,
    "async_scheduling": True,
    "max_model_len": 1024,
}


def asks() -> list[Ask]:
    return [Ask(IDS[137 * i : 137 * i + n], 60) for i, n in enumerate((300, 60, 517))]


def whole(ask: Ask, chunk: int = 256) -> list[tuple[int, int]]:
    """Steps of a request, where nobody saw the engine's: chunks of a prompt make no difference."""
    prompt = [(start, min(chunk, len(ask.ids) - start)) for start in range(0, len(ask.ids), chunk)]
    return prompt + [(len(ask.ids) + more, 1) for more in range(ask.max_tokens - 1)]


def check(oracle: Oracle, recipe: str, some: list[Ask], engine: Result) -> list[Replay]:
    replays = []
    for index, ask in enumerate(some):
        tokens = engine.tokens[index]
        assert tokens is not None and len(tokens) == ask.max_tokens
        steps = engine.steps_of(index) if engine.log else whole(ask)
        replay = oracle.replay(Recipe.parse(recipe), ask.ids, tokens, steps)
        assert replay.best == tokens
        assert replay.events
        if engine.events and any(engine.events):
            assert engine.events_of(index) == replay.events
        replays.append(replay)
    return replays


@pytest.fixture(scope="module")
def engines(tiny: Path) -> dict[tuple[str, str], Any]:
    """Engines with parts in other processes."""
    one, some = ENGINE | {"model": str(tiny)}, asks()
    ranks = one | {"tensor_parallel_size": 2}
    scenarios = {("apart", recipe): Scenario(recipe, some, engine=one, own_process=True) for recipe in RECIPES}
    scenarios |= {("ranks", recipe): Scenario(recipe, some, engine=ranks) for recipe in SHARED}
    return answers_of(scenarios, env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_scheduler_and_a_worker_in_other_processes(
    recipe: str, engines: dict[tuple[str, str], Any], tiny_oracle: Oracle
) -> None:
    engine = result(engines, ("apart", recipe))
    assert not engine.log  # nobody watched
    check(tiny_oracle, recipe, asks(), engine)
    assert engine.stats["events"] > 0 and engine.stats["blocks_freed"] > 0


@pytest.mark.parametrize("recipe", SHARED)
def test_ranks_that_share_the_heads(recipe: str, engines: dict[tuple[str, str], Any], tiny_oracle: Oracle) -> None:
    engine = result(engines, ("ranks", recipe))
    replays = check(tiny_oracle, recipe, asks(), engine)
    assert engine.stats["events"] == sum(len(replay.events) for replay in replays)  # one rank's count
    engine.check_nothing_left()


def test_drafts_that_are_taken_back(tiny: Path, tiny_oracle: Oracle) -> None:
    """After the prompt nothing is compressed, so that tokens and entries are those without drafts."""
    some = [Ask(IDS[:60] * 4, 60), Ask(IDS[100:130] * 9, 40)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    for recipe in ("snapkv(window=16, keep=96)", "expected_attention(keep=0.4)"):
        one = ENGINE | {"model": str(tiny)}
        plain, drafted = run(
            Scenario(recipe, some, engine=one),
            Scenario(recipe, some, engine=one | {"speculative_config": drafts}),
        )
        check(tiny_oracle, recipe, some, plain)
        assert drafted.tokens == plain.tokens
        assert [drafted.events_of(i) for i in range(2)] == [plain.events_of(i) for i in range(2)]
        taken = [tokens for log in drafted.log for _, start, tokens in log if start >= 200]
        assert max(taken) > 1 and len(drafted.steps) < len(plain.steps)  # some were drafted, and some were right
        drafted.check_nothing_left()


def test_a_scheduler_that_runs_ahead(tiny: Path, tiny_oracle: Oracle) -> None:
    """The scheduler plans a step before it knows the outcome of the one before."""
    some = asks()
    # Where layers have tables of their own, a block is of one group of layers.
    blocks = (64, TINY.num_hidden_layers * 64)
    engines = run(
        *(
            Scenario(
                recipe,
                some,
                engine=AHEAD | {"model": str(tiny), "num_gpu_blocks_override": number},
                stub_streams=True,
            )
            for recipe, number in zip(RECIPES, blocks, strict=True)
        )
    )
    for recipe, engine in zip(RECIPES, engines, strict=True):
        check(tiny_oracle, recipe, some, engine)
        engine.check_nothing_left()
