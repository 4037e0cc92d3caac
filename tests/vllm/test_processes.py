"""Engines in several processes: ranks that share heads, stages that share layers; and a scheduler that runs ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepset import Recipe
from keepset.vllm.settings import CONNECTOR
from tests.vllm.compared import IDS, NO_BINDING, answers_of, asks, networks_file, own_recipe, result
from tests.vllm.conftest import DEEP, TINY
from tests.vllm.engine import Ask, Result, Scenario, run
from tests.vllm.oracle import Oracle
from tests.vllm.test_own_budgets import OWN
from tests.vllm.test_own_budgets import asks as own_asks
from tests.vllm.test_tiny import EQUAL, FROM_DATA, LAYERS_DIFFER, NETWORKS, RAGGED

pytestmark = pytest.mark.full

CHUNK = 128
ASKS = asks((200, 60, 290), 40)
IN_FLIGHT = [Ask(IDS[300 * i : 300 * i + n], 30, add=3 * i) for i, n in enumerate((150, 90, 230, 60, 131))]
IN_FLIGHT += [replace(IN_FLIGHT[0], add=20), Ask(IDS[2000:2170], 30, add=12, abort=30)]
"""Prompts of several chunks. Some begin, and one is aborted, while others are in flight."""
BY_STAGES = [RAGGED, FROM_DATA, "gvote", NETWORKS]
"""Of seven layers of which the data say how much each keeps, the first two share a block table, and are in two
stages."""
SPLIT = {"VLLM_PP_LAYER_PARTITION": "1,6"}


def engine(model: Path, **more: Any) -> dict[str, Any]:
    sizes = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 8, "max_model_len": 512, "num_gpu_blocks_override": 192}
    return {"model": str(model), **sizes, **more}


def of_stages(model: Path, blocks: int = 40, **more: Any) -> dict[str, Any]:
    stages = {"pipeline_parallel_size": 2, "worker_extension_cls": "tests.vllm.stages.WorkerExtension"}
    return engine(model, **stages, num_gpu_blocks_override=blocks, **more)


def whole(ask: Ask) -> list[tuple[int, int]]:
    """Steps of a request, where nobody saw the engine's: chunks of a prompt make no difference."""
    prompt = [(start, min(CHUNK, len(ask.ids) - start)) for start in range(0, len(ask.ids), CHUNK)]
    return prompt + [(len(ask.ids) + more, 1) for more in range(ask.max_tokens - 1)]


def check(served: Result, some: list[Ask], recipe: str, oracle: Oracle, frees: bool = True) -> None:
    """Check tokens, entries if somebody watched, and the number of events, which the first layer's rank counts."""
    events, aborted = 0, 0
    for index, ask in enumerate(some):
        tokens, own = served.tokens[index] or [], own_recipe(Recipe.parse(recipe), ask)
        assert ask.abort is not None or len(tokens) == ask.max_tokens
        replay = oracle.replay(own, ask.ids, tokens, served.steps_of(index) if served.log else whole(ask))
        assert replay.best == tokens
        if any(served.events):
            assert served.events_of(index) == replay.events
        events += sum(0 in layers for _, layers, _ in replay.events)
        aborted += ask.abort is not None
    assert served.stats["events"] in range(events, events + aborted + 1)  # one may have come before it was taken away
    assert events > 0 and (served.stats["blocks_freed"] > 0 or not frees)
    served.check_nothing_left()


def test_parts_in_other_processes(tiny: Path, tiny_oracle: Oracle, tmp_path: Path) -> None:
    """A scheduler and a worker in others, and ranks that share the heads, of which one counts."""
    ranks, file = engine(tiny, tensor_parallel_size=2), networks_file(tmp_path, TINY.num_hidden_layers)
    recipes = (FROM_DATA, FROM_DATA, "gvote", f"distilled(stats='{file}', keep=40, every=16)")
    apart = Scenario(FROM_DATA, ASKS, engine=engine(tiny), own_process=True)
    results = run(apart, *(Scenario(recipe, ASKS, engine=ranks) for recipe in recipes[1:]), env=NO_BINDING)
    assert not results[0].log  # nobody watched
    for recipe, each in zip(recipes, results, strict=True):
        check(each, ASKS, recipe, tiny_oracle, frees=recipe != "gvote")  # which drops too few here to empty a block


def test_a_scheduler_that_runs_ahead(tiny: Path, tiny_oracle: Oracle) -> None:
    """The scheduler plans a step before it knows the outcome of the one before."""
    # Where layers have tables of their own, a block is of one group of layers.
    blocks = {EQUAL: 40, FROM_DATA: TINY.num_hidden_layers * 40}
    ahead = {recipe: engine(tiny, async_scheduling=True, num_gpu_blocks_override=blocks[recipe]) for recipe in blocks}
    results = run(*(Scenario(recipe, ASKS, engine=ahead[recipe], stub_streams=True) for recipe in blocks))
    for recipe, each in zip(blocks, results, strict=True):
        check(each, ASKS, recipe, tiny_oracle)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return networks_file(tmp_path_factory.mktemp("statistics"), DEEP)


@pytest.fixture(scope="module")
def stages(deep: Path, file: Path) -> dict[str, Any]:
    # Blocks that hold about as much, whatever a block holds.
    blocks = {recipe: 40 if recipe in (RAGGED, NETWORKS) else 40 * DEEP for recipe in BY_STAGES}
    scenarios = {
        recipe: Scenario(recipe.replace("FILE", str(file)), IN_FLIGHT, engine=of_stages(deep, blocks[recipe]))
        for recipe in BY_STAGES
    }
    return answers_of(scenarios, env=SPLIT)


@pytest.mark.parametrize("recipe", BY_STAGES)
def test_each_stage_compresses_its_layers(recipe: str, stages: dict[str, Any], file: Path, deep_oracle: Oracle) -> None:
    """While other requests are in the stage before: a request is in every other step, and others in those between."""
    served = result(stages, recipe)
    check(served, IN_FLIGHT, recipe.replace("FILE", str(file)), deep_oracle)
    steps = [{step for step, *_ in of_request} for of_request in served.log]
    assert any(later - one > 1 for mine in steps for one, later in zip(sorted(mine), sorted(mine)[1:], strict=False))
    assert len(set.union(*steps)) > max(map(len, steps))


def test_budgets_of_requests_in_stages(tiny: Path, tiny_oracle: Oracle) -> None:
    """Each layer has a block table, which one of the processes has no layer of."""
    some = own_asks(OWN)
    (served,) = run(Scenario(LAYERS_DIFFER, some, engine=of_stages(tiny, 160, kv_transfer_config=CONNECTOR)))
    assert served.groups == TINY.num_hidden_layers
    check(served, some, LAYERS_DIFFER, tiny_oracle)
