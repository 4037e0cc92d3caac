"""Drafts, by models, layers and n-grams: tokens and kept entries are those without them, whatever is taken back."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepset import Recipe
from tests.vllm import drafts
from tests.vllm.compared import IDS, answers_of, result
from tests.vllm.engine import Ask, Result, Scenario
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle
from tests.vllm.test_own_budgets import own_recipe
from tests.vllm.test_processes import engine

pytestmark = pytest.mark.full

settings = Late("keepset.vllm.settings")

ONCE, EQUAL = "snapkv(window=16, keep=96)", "snapkv(window=8, keep=64, every=24)"
RAGGED, ACROSS = "adakv(snapkv(window=8), keep=64, every=24)", "pool(snapkv(window=8), keep=64, every=24)"
ASKS = [Ask(IDS[:60] * 4, 60), Ask(IDS[100:130] * 9, 40), Ask([*IDS[:60] * 4, *IDS[500:520]], 30, add=25)]
OWN = [
    replace(ask, extra=extra)
    for ask, extra in zip(ASKS, (None, {"keepset": {"keep": 40}}, {"keepset": {"off": True}}), strict=True)
]
LEAVING = [*ASKS, Ask(IDS[:150], 60, add=3, abort=20)]
PREEMPTED = (12, 30)


def drafting(method: str, number: int, model: Path | None = None, **more: Any) -> dict[str, Any]:
    """An engine's arguments."""
    config = {"method": method, "num_speculative_tokens": number, **more} | ({"model": str(model)} if model else {})
    return {"speculative_config": config, "kv_transfer_config": settings.CONNECTOR}


@pytest.fixture(scope="module")
def scenarios(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scenario]:
    folder = tmp_path_factory.mktemp("drafts")
    answers = answers_of({"none": Scenario(EQUAL, ASKS, engine=engine(tiny))})
    said = [tokens or [] for tokens in result(answers, "none").tokens]
    eagle = drafts.save_eagle(folder / "eagle", tiny, said)
    eagle3 = drafting("eagle3", 1, drafts.save_eagle3(folder / "eagle3", tiny))
    ngram, shared = drafting("ngram", 3, prompt_lookup_max=3, prompt_lookup_min=1), {"enable_prefix_caching": True}
    return {
        "eagle": Scenario(EQUAL, LEAVING, PREEMPTED, engine(tiny, **drafting("eagle", 3, eagle))),
        "shared": Scenario(ONCE, ASKS, engine=engine(tiny, **drafting("eagle", 2, eagle), **shared)),
        "ragged": Scenario(RAGGED, LEAVING, PREEMPTED, engine(tiny, **drafting("eagle", 3, eagle))),
        "across": Scenario(ACROSS, ASKS, engine=engine(tiny, **drafting("eagle", 1, eagle))),
        "wrong": Scenario(EQUAL, ASKS, engine=engine(tiny, **eagle3)),
        "ngram": Scenario(EQUAL, OWN, engine=engine(tiny, **ngram)),
    }


@pytest.fixture(scope="module")
def engines(scenarios: dict[str, Scenario]) -> dict[str, Any]:
    return answers_of(scenarios)


@pytest.mark.parametrize("kind", ["eagle", "shared", "ragged", "across", "wrong", "ngram"])
def test_answers_are_those_without_drafts(
    kind: str, scenarios: dict[str, Scenario], engines: dict[str, Any], tiny_oracle: Oracle
) -> None:
    scenario, drafted = scenarios[kind], result(engines, kind)
    assert scenario.recipe is not None
    for index, ask in enumerate(scenario.requests):
        tokens, recipe = drafted.tokens[index] or [], own_recipe(Recipe.parse(scenario.recipe), ask)
        most = scenario.engine["speculative_config"]["num_speculative_tokens"]
        steps = drafts.without_drafts(drafted.steps_of(index), len(ask.ids), len(tokens), most)
        replay = tiny_oracle.replay(recipe, ask.ids, tokens, steps)
        assert replay.best[: len(tokens)] == tokens
        assert ask.abort is not None or len(tokens) == ask.max_tokens
        assert drafted.events_of(index) == replay.events[: len(drafted.events[index])]
        assert ask.abort is not None or len(drafted.events[index]) == len(replay.events)
    check_drafted(drafted, scenario.requests, right=kind == "eagle")
    drafted.check_nothing_left()


def check_drafted(drafted: Result, asks: Any, right: bool) -> None:
    """Check that tokens were drafted, that some were wrong and, if so asked, that some were right."""
    number = [
        (tokens - 1, later - start - 1)
        for ask, log in zip(asks, drafted.log, strict=True)
        for (_, start, tokens), (_, later, _) in itertools.pairwise(log)
        if start >= len(ask.ids) and start < later <= start + tokens
    ]
    assert any(some > taken for some, taken in number)
    assert any(taken for _, taken in number) or not right


def test_a_models_own_layer_that_drafts(tmp_path: Path) -> None:
    model = drafts.save_with_mtp(tmp_path / "model")
    without = result(answers_of({"none": Scenario(ONCE, ASKS, engine=engine(model))}), "none")
    drafts.teach_mtp(model, [tokens or [] for tokens in without.tokens])
    (drafted,) = answers_of({"mtp": Scenario(ONCE, ASKS, engine=engine(model, **drafting("mtp", 2)))}).values()
    drafted = result({"mtp": drafted}, "mtp")
    assert drafted.tokens == without.tokens
    events = [[(event["at"], event["layers"]) for event in own] for own in drafted.events]
    assert events == [[(event["at"], event["layers"]) for event in own] for own in without.events]
    check_drafted(drafted, ASKS, right=True)
    drafted.check_nothing_left()
