"""Engines under random load: lengths, aborts, preemptions. No page is lost, every answer comes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.compared import result
from tests.vllm.engine import Ask, Scenario, raw

pytestmark = pytest.mark.full

RECIPES = ["snapkv(window=8, keep=40, every=24)", "adakv(tova, keep=64, every=48)"]
REQUESTS = 120
AT_ONCE = 40
# So few that requests wait and are preempted: each may need 12, and the pool has 47.
ENGINE = {"num_gpu_blocks_override": 48, "max_model_len": 384, "max_num_seqs": 24, "max_num_batched_tokens": 128}


def random_asks(rng: random.Random) -> list[Ask]:
    """The same load on an engine: some come at once, some are aborted while they wait or run."""
    asks = []
    for number in range(REQUESTS):
        tokens, add = rng.randint(1, 120), max(0, number - AT_ONCE) * 4
        abort = rng.choice([None, None, None, None, add, add + rng.randint(1, 2 * tokens)])
        asks.append(Ask([rng.randrange(3, 512) for _ in range(rng.randint(1, 250))], tokens, add, abort))
    return asks


@pytest.fixture(scope="module")
def engines(tiny: Path) -> dict[str, Any]:
    some, engine = random_asks(random.Random(1)), ENGINE | {"model": str(tiny)}
    return dict(zip(RECIPES, raw(*(Scenario(recipe, some, (90, 200), engine) for recipe in RECIPES)), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_engine_loses_no_page_and_no_answer(recipe: str, engines: dict[str, Any]) -> None:
    engine, asks = result(engines, recipe), random_asks(random.Random(1))
    lengths = [len(tokens or []) for tokens in engine.tokens]
    whole = [length == ask.max_tokens for ask, length in zip(asks, lengths, strict=True)]
    assert all(ask.abort is not None or is_whole for ask, is_whole in zip(asks, whole, strict=True))
    answered = sum(whole)
    assert REQUESTS * 0.5 < answered < REQUESTS, "some must have been answered, and some aborted"
    assert sum(engine.preemptions) > 0
    assert engine.stats["events"] > 100 and engine.stats["blocks_freed"] > 100
    engine.check_nothing_left()
