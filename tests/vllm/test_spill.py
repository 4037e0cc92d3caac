"""Conversations that lose their pages go to files and come back: tokens and kept entries are those of one that stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.chats import ChatTurn, replay
from tests.vllm.compared import IDS, answers_of, full, result
from tests.vllm.conftest import oracle_of, save_tiny
from tests.vllm.engine import Ask, Result, Scenario
from tests.vllm.oracle import Oracle
from tests.vllm.test_conversations import ANSWERS, APART, CHATS, POOLED, SAID, WAYS, check
from tests.vllm.test_conversations import scenario as kept_scenario

FEW: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 600}
OTHERS = 3
"""Requests between two turns, which need all pages of a small pool."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("spilled"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return oracle_of(model)


def scenario(recipe: str, model: Path, folder: Path, asks: list[Ask], **engine: Any) -> Scenario:
    """An engine with few pages, which writes conversations to files."""
    spills = {"folder": str(folder), "bytes": 10**9, "owner_bytes": 10**9}
    more = {"keepset": recipe, "keepset_conversations": spills | engine.pop("limits", {})}
    more |= engine.pop("additional_config", {})
    return kept_scenario(recipe, model, asks, **FEW, additional_config=more, **engine)


def between(turns: list[ChatTurn]) -> list[Ask]:
    """The turns of a client, each of which finds that others have had its pages."""
    asks = []
    for number, turn in enumerate(turns):
        asks.append(Ask(turn.prompt, len(turn.answer), add=2 * APART * number))
    others = [IDS[1000 + 7 * number : 1570 + 7 * number] for number in range(OTHERS * (len(turns) - 1))]
    return [*asks, *(Ask(ids, 2, add=(2 * (number // OTHERS) + 1) * APART) for number, ids in enumerate(others))]


@pytest.mark.parametrize("recipe", [POOLED])
def test_comes_back_as_it_was(recipe: str, model: Path, oracle: Oracle, tmp_path: Path) -> None:
    turns = replay(oracle, recipe, SAID, ANSWERS)
    engine = result(answers_of({"": scenario(recipe, model, tmp_path, between(turns))}), "")
    print(engine.stats, engine.cached)
    check(turns, engine)
