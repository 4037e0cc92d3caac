"""Engines in several processes, ranks that share heads, and a scheduler that runs ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepset import Recipe
from tests.vllm.compared import NO_BINDING, asks, networks_file, run_in
from tests.vllm.conftest import TINY
from tests.vllm.engine import Ask, Result, Scenario, run
from tests.vllm.oracle import Oracle
from tests.vllm.test_tiny import EQUAL, FROM_DATA

pytestmark = pytest.mark.full

CHUNK = 128
ASKS = asks((200, 60, 290), 40)


def engine(tiny: Path, **more: Any) -> dict[str, Any]:
    sizes = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 8, "max_model_len": 512, "num_gpu_blocks_override": 192}
    return {"model": str(tiny), **sizes, **more}


def whole(ask: Ask) -> list[tuple[int, int]]:
    """Steps of a request, where nobody saw the engine's: chunks of a prompt make no difference."""
    prompt = [(start, min(CHUNK, len(ask.ids) - start)) for start in range(0, len(ask.ids), CHUNK)]
    return prompt + [(len(ask.ids) + more, 1) for more in range(ask.max_tokens - 1)]


def check(oracle: Oracle, recipe: str, some: list[Ask], engine: Result) -> int:
    """Check tokens, and entries if somebody watched; return the number of the reference's events."""
    count = 0
    for index, ask in enumerate(some):
        tokens = engine.tokens[index]
        assert tokens is not None and len(tokens) == ask.max_tokens
        replay = oracle.replay(Recipe.parse(recipe), ask.ids, tokens, whole(ask))
        assert replay.best == tokens
        assert replay.events
        if engine.events and any(engine.events):
            assert engine.events_of(index) == replay.events
        count += len(replay.events)
    engine.check_nothing_left()
    return count


def test_parts_in_other_processes(tiny: Path, tiny_oracle: Oracle, tmp_path: Path) -> None:
    """A scheduler and a worker in others, and ranks that share the heads, of which one counts."""
    ranks, file = engine(tiny, tensor_parallel_size=2), networks_file(tmp_path, TINY.num_hidden_layers)
    shared_by = (FROM_DATA, "gvote", f"distilled(stats='{file}', keep=40, every=16)")
    apart, *shared = run_in(
        NO_BINDING,
        Scenario(FROM_DATA, ASKS, engine=engine(tiny), own_process=True),
        *(Scenario(recipe, ASKS, engine=ranks) for recipe in shared_by),
    )
    assert not apart.log  # nobody watched
    check(tiny_oracle, FROM_DATA, ASKS, apart)
    assert apart.stats["events"] > 0 and apart.stats["blocks_freed"] > 0
    for recipe, each in zip(shared_by, shared, strict=True):
        assert each.stats["events"] == check(tiny_oracle, recipe, ASKS, each)


def test_a_scheduler_that_runs_ahead(tiny: Path, tiny_oracle: Oracle) -> None:
    """The scheduler plans a step before it knows the outcome of the one before."""
    # Where layers have tables of their own, a block is of one group of layers.
    blocks = {EQUAL: 40, FROM_DATA: TINY.num_hidden_layers * 40}
    ahead = {recipe: engine(tiny, async_scheduling=True, num_gpu_blocks_override=blocks[recipe]) for recipe in blocks}
    results = run(*(Scenario(recipe, ASKS, engine=ahead[recipe], stub_streams=True) for recipe in blocks))
    for recipe, each in zip(blocks, results, strict=True):
        check(tiny_oracle, recipe, ASKS, each)
