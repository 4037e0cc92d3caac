"""Pipeline parallelism: each process compresses its stage's layers, while other requests are in the stage before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from keepset import Recipe
from tests.vllm.compared import answers_of, result
from tests.vllm.conftest import TINY
from tests.vllm.engine import BLOCK, Ask, Result, Scenario, run
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle
from tests.vllm.test_own_budgets import OWN
from tests.vllm.test_own_budgets import asks as own_asks
from tests.vllm.test_tiny import EQUAL, IDS

pytestmark = pytest.mark.full
settings = Late("keepset.vllm.settings")

RAGGED = "adakv(snapkv(window=8), keep=40, every=12)"
LAYERS_DIFFER = "pyramid(snapkv(window=8), keep=48, every=8)"
FROM_DATA = ["mass(share=0.8, every=16)", "gvote"]
RECIPES = [EQUAL, RAGGED, LAYERS_DIFFER, *FROM_DATA]
LAYERS = 7
"""Of which the data say how much each keeps, the first two share a block table, and are in two stages."""
SPLIT = "1,6"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY.to_dict() | {"num_hidden_layers": LAYERS})).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(deep: Path) -> Oracle:
    return Oracle(LlamaForCausalLM.from_pretrained(deep).eval(), BLOCK)


def asks() -> list[Ask]:
    """Requests with prompts of several chunks. Some begin, and one is aborted, while others are in flight."""
    some = [Ask(IDS[300 * i : 300 * i + n], 30, add=3 * i) for i, n in enumerate((150, 90, 230, 60, 131))]
    return [*some, replace(some[0], add=20), Ask(IDS[2000:2170], 30, add=12, abort=30)]


def engine(model: Path, **more: Any) -> dict[str, Any]:
    sizes = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "max_model_len": 512, "num_gpu_blocks_override": 40}
    stages = {"pipeline_parallel_size": 2, "worker_extension_cls": "tests.vllm.stages.WorkerExtension"}
    return {"model": str(model), **sizes, **stages, **more}


def of(recipe: str, layers: int) -> int:
    """Blocks that hold about as much, whatever a block holds."""
    return 40 * layers if recipe in (LAYERS_DIFFER, *FROM_DATA) else 40


@pytest.fixture(scope="module")
def engines(deep: Path) -> dict[str, Any]:
    scenarios = {
        recipe: Scenario(recipe, asks(), engine=engine(deep, num_gpu_blocks_override=of(recipe, LAYERS)))
        for recipe in RECIPES
    }
    return answers_of(scenarios, env={"VLLM_PP_LAYER_PARTITION": SPLIT})


def check(served: Result, some: list[Ask], recipe: str, oracle: Oracle) -> None:
    events, aborted = 0, 0
    for index, ask in enumerate(some):
        tokens = served.tokens[index] or []
        assert ask.abort is not None or len(tokens) == ask.max_tokens
        replay = oracle.replay(Recipe.parse(recipe), ask.ids, tokens, served.steps_of(index))
        assert replay.best == tokens
        events += sum(0 in layers for _, layers, _ in replay.events)  # the first layer counts them
        aborted += ask.abort is not None
    assert served.stats["events"] in range(events, events + aborted + 1)  # one may have come before it was taken away
    assert served.stats["blocks_freed"] > 0
    served.check_nothing_left()


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_and_freed_pages_are_the_reference(recipe: str, engines: dict[str, Any], oracle: Oracle) -> None:
    check(result(engines, recipe), asks(), recipe, oracle)


def test_so_they_are_under_model_runner_v2(deep: Path, oracle: Oracle) -> None:
    """The default on GPUs; in Triton's interpreter it takes its time."""
    some = [replace(ask, max_tokens=15) for ask in asks()[:2]]
    (served,) = run(Scenario(RAGGED, some, engine=engine(deep), runner_v2=True))
    check(served, some, RAGGED, oracle)


def test_steps_overlap(engines: dict[str, Any]) -> None:
    """A request is computed in every other step, and others in those between."""
    log = result(engines, EQUAL).log
    steps = [{step for step, *_ in of_request} for of_request in log]
    assert any(later - one > 1 for mine in steps for one, later in zip(sorted(mine), sorted(mine)[1:], strict=False))
    assert len(set.union(*steps)) > max(map(len, steps))


def test_budgets_of_requests_own(tiny: Path) -> None:
    """Each layer has a block table, which one of the processes has no layer of."""
    connected = {"kv_transfer_config": settings.CONNECTOR, "num_gpu_blocks_override": 160}
    alone = {"pipeline_parallel_size": 1, **connected}
    some = own_asks(OWN)
    apart, together = run(
        Scenario(LAYERS_DIFFER, some, engine=engine(tiny, **connected)),
        Scenario(LAYERS_DIFFER, some, engine=engine(tiny, **alone)),
    )
    assert apart.groups == TINY.num_hidden_layers
    assert apart.tokens == together.tokens
    assert apart.stats["events"] == together.stats["events"] > 0
    assert apart.stats["entries_dropped"] == together.stats["entries_dropped"]
    apart.check_nothing_left()
