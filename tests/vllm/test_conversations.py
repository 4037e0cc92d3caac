"""Conversations stay in their pages between turns: tokens and kept entries are those of a model that simply goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiers import FULL
from tests.vllm.chats import ChatTurn, replay
from tests.vllm.compared import IDS, answers_of, full, networks_file, result
from tests.vllm.conftest import TINY, oracle_of, save_tiny
from tests.vllm.engine import Ask, Result, Scenario
from tests.vllm.oracle import Oracle

SAID = [IDS[0:150], IDS[200:240], IDS[300:423], IDS[500:516], IDS[600:640]]
"""What each turn adds."""
ANSWERS = 20
APART = 60
"""Steps from turn to turn, so that each has ended before the next begins."""
EQUAL = "snapkv(window=8, bytes=0.4, turns=True)"
RAGGED = "adakv(snapkv(window=8), keep=70, turns=True)"
POOLED = "pool(snapkv(window=8), bytes=0.3, turns=True)"
NETWORKS = "pool(distilled(stats='FILE'), bytes=0.3, turns=True)"
WHOLE = "adakv(streaming_llm, keep=1.0, turns=True)"
RECIPES = [EQUAL, RAGGED, POOLED, NETWORKS, WHOLE, "pyramid(snapkv(window=8), keep=80, turns=True)"]
ENGINE: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 160, "max_num_batched_tokens": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("chats"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return oracle_of(model)


def with_networks(recipe: str, model: Path) -> str:
    if "FILE" not in recipe:
        return recipe
    return recipe.replace("FILE", str(networks_file(model.parent, TINY.num_hidden_layers)))


def asked(turns: list[ChatTurn]) -> list[Ask]:
    """The requests of a client that sends the whole conversation with every turn."""
    return [Ask(turn.prompt, len(turn.answer), add=APART * number) for number, turn in enumerate(turns)]


def scenario(recipe: str, model: Path, asks: list[Ask], **engine: Any) -> Scenario:
    from keepset.vllm.settings import CONNECTOR

    more = {"model": str(model), "kv_transfer_config": CONNECTOR}
    settings = {name: engine.pop(name) for name in ("own_process", "stub_streams", "preempt") if name in engine}
    return Scenario(recipe, asks, engine={**ENGINE, **more, **engine}, **settings)


def check(turns: list[ChatTurn], engine: Result, first: int = 0) -> None:
    """Check that an engine has computed only what is new, and has said and kept what the reference has."""
    for number, turn in enumerate(turns, start=first):
        assert engine.tokens[number] == turn.answer
        assert engine.cached[number] == turn.goes_on_from
        if engine.log and turn.goes_on_from:
            assert [kept for at, kept, _ in engine.events_of(number) if kept] == [turn.begins_with]
    if engine.log:
        engine.check_nothing_left()


WAYS: dict[str, dict[str, Any]] = {"": {}, "ahead": {"stub_streams": True}, "own process": {"own_process": True}}


@pytest.fixture(scope="module")
def chats(model: Path, oracle: Oracle) -> dict[str, list[ChatTurn]]:
    return {recipe: replay(oracle, with_networks(recipe, model), SAID, ANSWERS) for recipe in RECIPES}


@pytest.fixture(scope="module")
def answers(model: Path, chats: dict[str, list[ChatTurn]]) -> dict[Any, Any]:
    ways = WAYS if FULL else {"": {}}
    return answers_of(
        {
            (recipe, way): scenario(with_networks(recipe, model), model, asked(chats[recipe]), **more)
            for recipe in RECIPES
            for way, more in ways.items()
        }
    )


@pytest.mark.parametrize("way", ["", *full(["ahead", "own process"])])
@pytest.mark.parametrize("recipe", RECIPES)
def test_goes_on_as_a_model_would(
    recipe: str, way: str, answers: dict[Any, Any], chats: dict[str, list[ChatTurn]]
) -> None:
    check(chats[recipe], result(answers, (recipe, way)))
