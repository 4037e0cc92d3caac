"""vLLM's model runner V2, the default on GPUs: every token and every kept entry is the reference's, as under V1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.compared import check_oracle
from tests.vllm.engine import Ask, Result, Scenario, run
from tests.vllm.oracle import Oracle
from tests.vllm.test_tiny import CHUNKED, ENGINE, FROM_DATA, LIFE, UNDISTURBED

pytestmark = pytest.mark.full

SHORT = [Ask(ask.ids, 20) for ask in UNDISTURBED]
"""Each step takes a tenth of a second: its kernels are interpreted. These are events at the prompt's end and later."""
# Equal heads are in the last two.
SCENARIOS = {
    "ragged heads": Scenario("adakv(snapkv(window=8), keep=40, every=12)", SHORT, engine=CHUNKED),
    "layers of their own": Scenario("pyramid(snapkv(window=8), keep=48, every=8)", SHORT, engine=CHUNKED),
    "counts from the data": Scenario(FROM_DATA, SHORT, engine=CHUNKED, layer_groups=2),
    "turmoil": LIFE["turmoil"],
    "sharing": LIFE["sharing"],
}


@pytest.fixture(scope="module")
def engines(tiny: Path) -> dict[str, Result]:
    def ready(scenario: Scenario, **more: Any) -> Scenario:
        return replace(scenario, engine={"model": str(tiny), **ENGINE, **scenario.engine}, runner_v2=True, **more)

    scenarios = [*SCENARIOS.values(), Scenario(None, SHORT, engine=CHUNKED)]
    return dict(zip([*SCENARIOS, "no recipe"], run(*map(ready, scenarios)), strict=True))


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_is_the_reference(name: str, engines: dict[str, Result], tiny_oracle: Oracle) -> None:
    scenario, engine = SCENARIOS[name], engines[name]
    assert scenario.recipe is not None
    assert engine.classes == ["CPUKeepImpl"] and engine.stats["entries_dropped"] > 0
    check_oracle(tiny_oracle, scenario.recipe, list(scenario.requests), engine)


def test_it_shares_prefixes_and_preempts(engines: dict[str, Result]) -> None:
    assert engines["sharing"].cached == [0, 96, 160, 160]
    assert engines["turmoil"].preemptions[:3] == [2, 2, 2]


def test_without_a_recipe_it_is_vllm(engines: dict[str, Result], tiny_oracle: Oracle) -> None:
    engine = engines["no recipe"]
    assert engine.classes == ["CPUAttentionBackendImpl"] and not any(engine.events)
    check_oracle(tiny_oracle, None, SHORT, engine)
