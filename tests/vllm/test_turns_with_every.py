"""A long answer is compressed while it is decoded, also in a conversation that is compressed between turns."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from keepset import Recipe
from tests.vllm.chats import ChatTurn, replay
from tests.vllm.compared import answers_of, result
from tests.vllm.conftest import oracle_of, save_tiny
from tests.vllm.engine import Ask
from tests.vllm.test_conversations import ANSWERS, APART, CHATS, SAID, asked, scenario

POOLED = "pool(snapkv(window=8), keep=70, every=6, turns=True)"
CASES = [
    (POOLED, "goes on"),
    *((POOLED, chat) for chat in ("left out", "reworded")),
    ("snapkv(window=8, keep=70, every=9, turns=True)", "goes on"),
    ("ams(snapkv(window=4), window=4, kernel=3, sinks=2, recent=4, keep=64, every=9, turns=True)", "goes on"),
]
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("every"))


@pytest.fixture(scope="module")
def chats(model: Path) -> dict[tuple[str, str], list[ChatTurn]]:
    oracle = oracle_of(model)
    return {(recipe, chat): replay(oracle, recipe, SAID, ANSWERS, **CHATS[chat]) for recipe, chat in CASES}


@pytest.fixture(scope="module")
def answers(model: Path, chats: dict[tuple[str, str], list[ChatTurn]]) -> dict[Any, Any]:
    return answers_of({case: scenario(case[0], model, asked(turns)) for case, turns in chats.items()})


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_goes_on_as_a_model_would(
    case: tuple[str, str], answers: dict[Any, Any], chats: dict[tuple[str, str], list[ChatTurn]]
) -> None:
    """A turn begins with the entries that the reference has, and while it is answered there are events."""
    engine, every = result(answers, case), Recipe.parse(case[0]).schedule.every
    for number, turn in enumerate(chats[case]):
        assert engine.tokens[number] == turn.answer
        assert engine.cached[number] == turn.reused
        begin, answer = engine.events_of(number)[: bool(number)], engine.events_of(number)[bool(number) :]
        assert [kept for _, kept, _ in begin] == [turn.begins_with] * bool(number)
        assert len(answer) == (ANSWERS - 1) // every
        assert {later[0] - event[0] for event, later in pairwise(answer)} == {every}
    engine.check_nothing_left()


def test_a_turn_whose_answer_has_dropped_entries_is_computed_anew(model: Path) -> None:
    """Asked for again it is answered alike; if its answer had no event, it goes on."""
    (first,) = replay(oracle_of(model), POOLED, SAID[:1], ANSWERS)
    for tokens, reused in [(5, len(first.prompt) - 1), (ANSWERS, 0)]:
        asks = [Ask(first.prompt, tokens), Ask(first.prompt, ANSWERS, add=APART)]
        engine = result(answers_of({"": scenario(POOLED, model, asks)}), "")
        assert engine.tokens == [first.answer[:tokens], first.answer] and engine.cached == [0, reused]
        engine.check_nothing_left()
