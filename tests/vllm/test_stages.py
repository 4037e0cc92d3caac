"""Pipeline parallelism: each process compresses its stage's layers, while other requests are in the stage before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepset import Recipe
from tests.vllm.compared import IDS, answers_of, networks_file, result
from tests.vllm.conftest import DEEP, TINY
from tests.vllm.engine import Ask, Result, Scenario, run
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle
from tests.vllm.test_own_budgets import OWN, own_recipe
from tests.vllm.test_own_budgets import asks as own_asks
from tests.vllm.test_tiny import FROM_DATA, LAYERS_DIFFER, NETWORKS, RAGGED

pytestmark = pytest.mark.full
settings = Late("keepset.vllm.settings")

RECIPES = [RAGGED, FROM_DATA, "gvote", NETWORKS]
"""Of seven layers of which the data say how much each keeps, the first two share a block table, and are in two
stages."""
SPLIT = "1,6"


def asks() -> list[Ask]:
    """Requests with prompts of several chunks. Some begin, and one is aborted, while others are in flight."""
    some = [Ask(IDS[300 * i : 300 * i + n], 30, add=3 * i) for i, n in enumerate((150, 90, 230, 60, 131))]
    return [*some, replace(some[0], add=20), Ask(IDS[2000:2170], 30, add=12, abort=30)]


def engine(model: Path, **more: Any) -> dict[str, Any]:
    sizes = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "max_model_len": 512, "num_gpu_blocks_override": 40}
    stages = {"pipeline_parallel_size": 2, "worker_extension_cls": "tests.vllm.stages.WorkerExtension"}
    return {"model": str(model), **sizes, **stages, **more}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return networks_file(tmp_path_factory.mktemp("statistics"), DEEP)


@pytest.fixture(scope="module")
def engines(deep: Path, file: Path) -> dict[str, Any]:
    # Blocks that hold about as much, whatever a block holds.
    blocks = {recipe: 40 if recipe in (RAGGED, NETWORKS) else 40 * DEEP for recipe in RECIPES}
    scenarios = {
        recipe: Scenario(
            recipe.replace("FILE", str(file)), asks(), engine=engine(deep, num_gpu_blocks_override=blocks[recipe])
        )
        for recipe in RECIPES
    }
    return answers_of(scenarios, env={"VLLM_PP_LAYER_PARTITION": SPLIT})


def check(served: Result, some: list[Ask], recipe: str, oracle: Oracle) -> None:
    """Check tokens and the number of events, which the first layer counts; nobody watched what was kept."""
    events, aborted = 0, 0
    for index, ask in enumerate(some):
        tokens, own = served.tokens[index] or [], own_recipe(Recipe.parse(recipe), ask)
        assert ask.abort is not None or len(tokens) == ask.max_tokens
        replay = oracle.replay(own, ask.ids, tokens, served.steps_of(index))
        assert replay.best == tokens
        events += sum(0 in layers for _, layers, _ in replay.events)
        aborted += ask.abort is not None
    assert served.stats["events"] in range(events, events + aborted + 1)  # one may have come before it was taken away
    assert served.stats["blocks_freed"] > 0
    served.check_nothing_left()


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_and_freed_pages_are_the_reference(
    recipe: str, engines: dict[str, Any], file: Path, deep_oracle: Oracle
) -> None:
    check(result(engines, recipe), asks(), recipe.replace("FILE", str(file)), deep_oracle)


def test_steps_overlap(engines: dict[str, Any]) -> None:
    """A request is computed in every other step, and others in those between."""
    log = result(engines, RAGGED).log
    steps = [{step for step, *_ in of_request} for of_request in log]
    assert any(later - one > 1 for mine in steps for one, later in zip(sorted(mine), sorted(mine)[1:], strict=False))
    assert len(set.union(*steps)) > max(map(len, steps))


def test_budgets_of_requests_own(tiny: Path, tiny_oracle: Oracle) -> None:
    """Each layer has a block table, which one of the processes has no layer of."""
    connected = {"kv_transfer_config": settings.CONNECTOR, "num_gpu_blocks_override": 160}
    (served,) = run(Scenario(LAYERS_DIFFER, own_asks(OWN), engine=engine(tiny, **connected)))
    assert served.groups == TINY.num_hidden_layers
    check(served, own_asks(OWN), LAYERS_DIFFER, tiny_oracle)
