"""Conversations stay in their pages between turns: tokens and kept entries are those of a model that simply goes on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import FULL
from tests.vllm.chats import ChatTurn, replay
from tests.vllm.compared import IDS, answers_of, full, networks_file, result
from tests.vllm.conftest import TINY, oracle_of, save_tiny
from tests.vllm.engine import Ask, Result, Scenario, sealed
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
        assert engine.cached[number] == turn.reused
        if engine.log and turn.reused:
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


AGAIN = (0, 2, 3)


@pytest.mark.parametrize("recipe", [RAGGED, *full([EQUAL, POOLED, NETWORKS, WHOLE])])
def test_a_turn_that_is_asked_for_again_is_answered_alike(recipe: str, model: Path, oracle: Oracle) -> None:
    """Nothing was dropped since the turn began; only what came after the prompt goes, and the last token is fed."""
    named = with_networks(recipe, model)
    turns = replay(oracle, named, SAID, ANSWERS, again=AGAIN)
    assert [turn.answer for turn in turns[:2]] == [turns[0].answer] * 2
    answer = answers_of({"": scenario(named, model, asked(turns))})
    check(turns, result(answer, ""))


LEFT_OUT = {1: [(150, 163)], 3: [(40, 81), (170, 200)], 4: [(81, 100)]}
"""Spans that the client leaves out from a turn on: part of an answer, older ones, and what is next to such a one."""
NESTED = {2: [(170, 190)], 3: [(160, 205)]}
"""A span around one that was left out before."""


@pytest.mark.parametrize("left_out", [LEFT_OUT, *full([NESTED])], ids=["apart", "nested"])
@pytest.mark.parametrize("recipe", [POOLED, *full([EQUAL, RAGGED, NETWORKS, WHOLE])])
def test_what_a_client_leaves_out_is_dropped_and_nothing_computed_again(
    recipe: str, left_out: dict[int, list[tuple[int, int]]], model: Path, oracle: Oracle
) -> None:
    named = with_networks(recipe, model)
    turns = replay(oracle, named, SAID, ANSWERS, left_out=left_out)
    gone = 103 if left_out is LEFT_OUT else 45
    assert turns[-1].reused < len(turns[-1].prompt) == sum(map(len, SAID)) + 4 * ANSWERS - gone
    check(turns, result(answers_of({"": scenario(named, model, asked(turns))}), ""))


def test_other_owners_and_names_are_other_conversations(model: Path, oracle: Oracle) -> None:
    """Whoever sends the same text under another key, or names another conversation, goes on with nothing."""
    turns = replay(oracle, RAGGED, SAID[:2], ANSWERS)
    first, second = turns
    options = [{"owner": "1" * 32}, {"owner": "2" * 32}, {"conversation": "a"}, {"conversation": "b"}, {}]
    asks = [Ask(first.prompt, ANSWERS, extra=sealed(**options[number])) for number in (0, 2)]
    asks += [Ask(second.prompt, ANSWERS, add=APART, extra=sealed(**more)) for more in options]
    signed = {"additional_config": {"keepset": RAGGED, "keepset_signed": True}}
    engine = result(answers_of({"": scenario(RAGGED, model, asks, **signed)}), "")
    assert engine.cached == [0, 0, second.reused, 0, second.reused, 0, 0]
    assert [engine.tokens[number] for number in (0, 1, 2, 4)] == [first.answer] * 2 + [second.answer] * 2


def plain_chats(oracle: Oracle, number: int, turns: int, seed: int) -> list[list[ChatTurn]]:
    """Conversations of random lengths, of which two begin alike, without compression."""
    draw = random.Random(seed)
    chats = []
    for chat in range(number):
        said = [IDS[97 * chat + 331 * turn :][: draw.randint(3, 90)] for turn in range(turns)]
        said[0] = IDS[1000:1090] + said[0] if chat % 3 == 0 else said[0]
        chats.append(replay(oracle, WHOLE, said, ANSWERS))
    return chats


@pytest.mark.parametrize("case", [("", 0), *full([("ahead", 0), ("ahead", 1), ("", 2), ("own process", 3)])])
def test_nothing_is_mixed_up(case: tuple[str, int], model: Path, oracle: Oracle) -> None:
    """Many conversations at once in few pages, with turns that are asked for again, given up and preempted.

    Whatever is computed anew and whatever goes on, the answers are those of a model that keeps everything.
    """
    way, seed = case
    draw, asks, expected = random.Random(seed), [], []
    for chat in plain_chats(oracle, 9, 4, seed):
        step = draw.randint(0, 60)
        for turn in chat:
            for _ in range(draw.choice([1, 1, 1, 2])):
                abort = step + draw.randint(1, 25) if draw.random() < 0.2 else None
                asks.append(Ask(turn.prompt, len(turn.answer), add=step, abort=abort))
                expected.append(turn.answer)
                step += draw.choice([1, 30, 45, 90])
    few = {"num_gpu_blocks_override": 40, "max_num_seqs": 6, "max_model_len": 600}
    engine = result(answers_of({"": scenario(WHOLE, model, asks, **few, **WAYS[way])}), "")
    for ask, answer, tokens in zip(asks, expected, engine.tokens, strict=True):
        assert tokens is not None or ask.abort is not None
        assert answer[: len(tokens or [])] == (tokens or [])
        assert ask.abort is not None or len(tokens or []) == len(answer)
    went_on = [cached for cached in engine.cached if cached]
    assert len(went_on) > len(asks) // 5
    if engine.log:
        engine.check_nothing_left()
