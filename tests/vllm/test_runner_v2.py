"""vLLM's model runner V2, the default on GPUs: every token and every kept entry is the reference's, as under V1.

Each step takes a tenth of a second, because its kernels are interpreted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.compared import CHUNKED, IDS, asks, check_oracle
from tests.vllm.engine import Ask, Result, Scenario, run
from tests.vllm.oracle import Oracle
from tests.vllm.test_processes import check as check_stages
from tests.vllm.test_processes import of_stages
from tests.vllm.test_tiny import ENGINE, EQUAL, FROM_DATA, LIFE, RAGGED, UNDISTURBED

pytestmark = pytest.mark.full

SHORT = [replace(ask, max_tokens=20) for ask in UNDISTURBED]
SCENARIOS = {
    "ragged heads": Scenario(RAGGED, SHORT, engine=CHUNKED),
    "counts from the data": Scenario(FROM_DATA, SHORT, engine=CHUNKED, layer_groups=2),
    "turmoil": LIFE["turmoil"],
    "sharing": LIFE["sharing"],
}


def ready(tiny: Path, scenario: Scenario, **more: Any) -> Scenario:
    return replace(scenario, engine={"model": str(tiny), **ENGINE, **scenario.engine}, runner_v2=True, **more)


@pytest.fixture(scope="module")
def engines(tiny: Path) -> dict[str, Result]:
    scenarios = [ready(tiny, scenario) for scenario in SCENARIOS.values()]
    return dict(zip(SCENARIOS, run(*scenarios), strict=True))


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_is_the_reference(name: str, engines: dict[str, Result], tiny_oracle: Oracle) -> None:
    scenario, engine = SCENARIOS[name], engines[name]
    assert engine.classes == ["CPUKeepImpl"] and engine.stats["entries_dropped"] > 0
    check_oracle(tiny_oracle, scenario.recipe, list(scenario.requests), engine)
    if name == "sharing":
        assert engine.cached == [0, 96, 160, 160]
    if name == "turmoil":
        assert engine.preemptions[:3] == [2, 2, 2]


def test_in_graphs(tiny: Path, tiny_oracle: Oracle) -> None:
    """The runner captures and replays by itself; three requests fill a graph of four up."""
    some, recipes = [*asks((130, 90), 22), Ask(IDS[9:100], 14, add=9)], [EQUAL, RAGGED]
    scenarios = [Scenario(recipe, some, engine={"max_num_seqs": 8, **CHUNKED}) for recipe in recipes]
    results = run(*(ready(tiny, each, backend="FLASH_ATTN", graphs=True) for each in scenarios))
    for recipe, result in zip(recipes, results, strict=True):
        assert result.replays > 10
        assert all(result.events)
        check_oracle(tiny_oracle, recipe, some, result)


def test_in_stages(deep: Path, deep_oracle: Oracle) -> None:
    some = asks((150, 90), 15)
    (served,) = run(Scenario(RAGGED, some, engine=of_stages(deep), runner_v2=True))
    check_stages(served, some, RAGGED, deep_oracle)
