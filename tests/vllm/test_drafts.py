"""Models and layers that draft: they are left whole, and tokens and kept entries are those without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import drafts
from tests.vllm.compared import IDS, answers_of, result
from tests.vllm.engine import Ask, Result, Scenario
from tests.vllm.oracle import Oracle
from tests.vllm.test_processes import check, engine, whole

pytestmark = pytest.mark.full

RECIPE = "snapkv(window=16, keep=96)"
ASKS = [Ask(IDS[:60] * 4, 60), Ask(IDS[100:130] * 9, 40), Ask([*IDS[:60] * 4, *IDS[500:520]], 30, add=25)]
PREEMPTED = (12, 30)


def drafting(method: str, model: Path | None = None, **more: Any) -> dict[str, Any]:
    """An engine's arguments, with the prefix cache on."""
    config = {"method": method, "num_speculative_tokens": 2, **more} | ({"model": str(model)} if model else {})
    return {"speculative_config": config, "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def engines(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("drafts")
    answers = answers_of({"none": Scenario(RECIPE, ASKS, engine=engine(tiny))})
    said = [tokens or [] for tokens in result(answers, "none").tokens]
    kinds = {
        "eagle": drafting("eagle", drafts.save_eagle(folder / "eagle", tiny, said)),
        "eagle3": drafting("eagle3", drafts.save_eagle3(folder / "eagle3", tiny)),
    }
    scenarios: dict[Any, Scenario] = {
        kind: Scenario(RECIPE, ASKS, engine=engine(tiny, **more)) for kind, more in kinds.items()
    }
    scenarios["preempted"] = Scenario(RECIPE, ASKS, PREEMPTED, engine(tiny, **kinds["eagle"]))
    return answers | answers_of(scenarios)


def check_drafted(drafted: Result, right: bool) -> None:
    """Check that tokens were drafted, and that some were right."""
    taken = [tokens for ask, log in zip(ASKS, drafted.log, strict=True) for _, at, tokens in log if at >= len(ask.ids)]
    assert max(taken) > 1
    steps = [len(log) < len(whole(ask)) for ask, log in zip(ASKS, drafted.log, strict=True)]
    assert any(steps) or not right


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_answers_are_those_without_drafts(kind: str, engines: dict[Any, Any], tiny_oracle: Oracle) -> None:
    drafted = result(engines, kind)
    check(tiny_oracle, RECIPE, ASKS, drafted)
    check_drafted(drafted, kind == "eagle")
    assert drafted.tokens == result(engines, "none").tokens


def test_nothing_is_lost_where_requests_are_preempted(engines: dict[Any, Any]) -> None:
    drafted = result(engines, "preempted")
    assert all(drafted.preemptions[:2]) and [len(tokens or []) for tokens in drafted.tokens] == [60, 40, 30]
    check_drafted(drafted, right=False)
    drafted.check_nothing_left()


def test_a_models_own_layer_that_drafts(tmp_path: Path) -> None:
    model = drafts.save_with_mtp(tmp_path / "model")
    without = result(answers_of({"none": Scenario(RECIPE, ASKS, engine=engine(model))}), "none")
    drafts.teach_mtp(model, [tokens or [] for tokens in without.tokens])
    (drafted,) = answers_of({"mtp": Scenario(RECIPE, ASKS, engine=engine(model, **drafting("mtp")))}).values()
    drafted = result({"mtp": drafted}, "mtp")
    assert drafted.tokens == without.tokens
    assert [events[0]["layers"] for events in drafted.events] == [events[0]["layers"] for events in without.events]
    check_drafted(drafted, right=True)
    drafted.check_nothing_left()
