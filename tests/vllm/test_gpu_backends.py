"""The backends for GPUs, whole but for their kernels, which plain torch stands in for.

In pretended CUDA graphs no layer is called. Every token and entry is the reference's. So they are under vLLM's model
runner V2, the default on GPUs, where each step takes a tenth of a second, because its kernels are interpreted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.vllm.compared import CHUNKED, IDS, asks, check_oracle, check_transformers
from tests.vllm.engine import Ask, Result, Scenario, run
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle
from tests.vllm.test_own_budgets import OWN
from tests.vllm.test_own_budgets import asks as own_asks
from tests.vllm.test_processes import check as check_stages
from tests.vllm.test_processes import of_stages
from tests.vllm.test_tiny import ENGINE, EQUAL, FROM_DATA, LAYERS_DIFFER, LIFE, MOMENTS, RAGGED, UNDISTURBED

pytestmark = pytest.mark.full
settings = Late("keepset.vllm.settings")

BIASED = "match(snapkv(window=8), window=8, keep=40, every=12)"
IMPLS = {"FLASH_ATTN": "FlashKeepImpl", "TRITON_ATTN": "TritonKeepImpl", "FLASHINFER": "FlashInferKeepImpl"}
CALLED = {"FLASH_ATTN": [EQUAL, RAGGED], "TRITON_ATTN": [EQUAL], "FLASHINFER": [LAYERS_DIFFER]}
REPLAYED = {
    "FLASH_ATTN": [EQUAL, RAGGED, MOMENTS, FROM_DATA],
    "TRITON_ATTN": [EQUAL, RAGGED],
    "FLASHINFER": [EQUAL, RAGGED, LAYERS_DIFFER],
}
"""FlashInfer plans on the host what a replay attends to, before each. What a recipe looks at is no concern of a
backend."""


def engine(tiny: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(tiny), "max_num_seqs": 8, **CHUNKED, **more}


@pytest.mark.parametrize("backend", IMPLS)
def test_called_steps_are_the_reference(backend: str, tiny: Path, tiny_oracle: Oracle) -> None:
    some, recipes = asks((130, 70, 230), 24), CALLED[backend]
    results = run(*(Scenario(recipe, some, engine=engine(tiny), backend=backend) for recipe in recipes))
    for recipe, each in zip(recipes, results, strict=True):
        assert each.classes == [IMPLS[backend]]
        assert all(each.events)
        check_oracle(tiny_oracle, recipe, some, each)


@pytest.mark.parametrize("backend", IMPLS)
def test_replayed_steps_are_the_reference(
    backend: str, tiny: Path, tiny_oracle: Oracle, tiny_model: PreTrainedModel
) -> None:
    """The last chunk of some prompts is one token, which may be replayed among decoding ones.

    Groups of layers are told apart also after vLLM has measured graphs with a cache made for that. Of biases the
    reference knows nothing: there the transformers runtime is it.
    """
    some = [*asks((129, 90, 200), 30), Ask(IDS[50:179], 30, add=5), Ask(IDS[9:100], 20, add=9)]
    recipes, own, fitted = REPLAYED[backend], own_asks(OWN), asks((129, 90), 30)
    scenarios = [Scenario(recipe, some, engine=engine(tiny)) for recipe in recipes]
    if backend == "FLASH_ATTN":
        connected = engine(tiny, kv_transfer_config=settings.CONNECTOR)
        scenarios += [Scenario(EQUAL, own, engine=connected), Scenario(BIASED, fitted, engine=engine(tiny))]
    results = run(*(Scenario(**vars(each) | {"backend": backend, "graphs": True}) for each in scenarios))
    for each in results:
        assert each.replays > 10 and any(each.events)
    for recipe, each in zip(recipes, results, strict=False):
        check_oracle(tiny_oracle, recipe, some, each)
    if backend == "FLASH_ATTN":
        check_oracle(tiny_oracle, EQUAL, own, results[-2])
        check_transformers(tiny_model, BIASED, fitted, results[-1])


def test_ragged_heads_by_keepsets_own_kernels(tiny: Path, tiny_oracle: Oracle, tiny_model: PreTrainedModel) -> None:
    """In Triton's interpreter, one at a time and beside prompts, after events and before, and preempted once."""
    some = [Ask(IDS[200 * i : 200 * i + n], 14, add=add) for i, (n, add) in enumerate([(130, 0), (70, 0), (100, 7)])]
    small: dict[str, Any] = engine(tiny, max_num_batched_tokens=96, block_size=16)
    plain, fitted = run(
        Scenario(RAGGED, some, preempt=(10,), engine=small, backend="FLASH_ATTN", triton=True),
        Scenario(BIASED, some, engine=small, backend="FLASH_ATTN", triton=True),
    )
    for each in (plain, fitted):
        assert each.classes == ["FlashKeepImpl"] and all(each.events)
    assert sum(plain.preemptions) > 1
    check_oracle(Oracle(tiny_oracle.model, 16), RAGGED, some, plain)
    check_transformers(tiny_model, BIASED, some, fitted)


SHORT = [replace(ask, max_tokens=20) for ask in UNDISTURBED]
SCENARIOS = {
    "ragged heads": Scenario(RAGGED, SHORT, engine=CHUNKED),
    "counts from the data": Scenario(FROM_DATA, SHORT, engine=CHUNKED, layer_groups=2),
    "turmoil": LIFE["turmoil"],
    "sharing": LIFE["sharing"],
}


def under_v2(tiny: Path, scenario: Scenario, **more: Any) -> Scenario:
    return replace(scenario, engine={"model": str(tiny), **ENGINE, **scenario.engine}, runner_v2=True, **more)


@pytest.fixture(scope="module")
def of_runner_v2(tiny: Path) -> dict[str, Result]:
    scenarios = [under_v2(tiny, scenario) for scenario in SCENARIOS.values()]
    return dict(zip(SCENARIOS, run(*scenarios), strict=True))


@pytest.mark.parametrize("name", SCENARIOS)
def test_runner_v2_is_the_reference(name: str, of_runner_v2: dict[str, Result], tiny_oracle: Oracle) -> None:
    scenario, engine = SCENARIOS[name], of_runner_v2[name]
    assert engine.classes == ["CPUKeepImpl"] and engine.stats["entries_dropped"] > 0
    check_oracle(tiny_oracle, scenario.recipe, list(scenario.requests), engine)
    if name == "sharing":
        assert engine.cached == [0, 96, 160, 160]
    if name == "turmoil":
        assert engine.preemptions[:3] == [2, 2, 2]


def test_runner_v2_in_graphs(tiny: Path, tiny_oracle: Oracle) -> None:
    """The runner captures and replays by itself; three requests fill a graph of four up."""
    some, recipes = [*asks((130, 90), 22), Ask(IDS[9:100], 14, add=9)], [EQUAL, RAGGED]
    scenarios = [Scenario(recipe, some, engine={"max_num_seqs": 8, **CHUNKED}) for recipe in recipes]
    results = run(*(under_v2(tiny, each, backend="FLASH_ATTN", graphs=True) for each in scenarios))
    for recipe, result in zip(recipes, results, strict=True):
        assert result.replays > 10
        assert all(result.events)
        check_oracle(tiny_oracle, recipe, some, result)


def test_runner_v2_in_stages(deep: Path, deep_oracle: Oracle) -> None:
    some = asks((150, 90), 15)
    (served,) = run(Scenario(RAGGED, some, engine=of_stages(deep), runner_v2=True))
    check_stages(served, some, RAGGED, deep_oracle)
