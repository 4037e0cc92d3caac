"""How many of keepset's functions a step calls in which nothing is due."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepset.vllm.settings import CONNECTOR, CONVERSATION_CONNECTOR
from tests import tiers
from tests.vllm.compared import answers_of, asks, result
from tests.vllm.conftest import save_tiny
from tests.vllm.engine import Scenario

# A check of types is itself called.
pytestmark = pytest.mark.skipif(tiers.TYPECHECK, reason="types are checked while tests run")
RECIPE = "snapkv(window=8, keep=40, every=64)"
CASES = [(3, 1), (3, 20), (12, 20)]

TALKING = "adakv(snapkv(window=8), keep=40, turns=True)"


def test_few_calls_where_a_chat_decodes(tmp_path: Path) -> None:
    """Every query is recorded, for all requests at once: each layer of such a recipe is a group of its own."""
    scenarios = {}
    for layers, requests in CASES:
        model = save_tiny(tmp_path / str(layers), num_hidden_layers=layers)
        engine = {"model": str(model), "kv_transfer_config": CONVERSATION_CONNECTOR}
        scenarios[layers, requests] = Scenario(TALKING, asks((70,) * requests, 40), engine=engine, count_calls=True)
    answers = answers_of(scenarios)
    for layers, requests in CASES:
        made = result(answers, (layers, requests)).made
        assert 0 < made[15] <= 80 + 5 * requests + 14 * layers, made


def test_few_calls_where_nothing_is_due(tmp_path: Path) -> None:
    """vLLM asks a group of layers three times a request, and a layer twice; all else is for all of them at once."""
    scenarios = {}
    for layers, requests in CASES:
        model = save_tiny(tmp_path / str(layers), num_hidden_layers=layers)
        engine = {"model": str(model), "kv_transfer_config": CONNECTOR}
        load = asks((70,) * requests, 40)
        scenarios[layers, requests] = Scenario(
            "snapkv(window=8, keep=40, every=64)", load, engine=engine, count_calls=True
        )
    answers = answers_of(scenarios)
    for layers, requests in CASES:
        made = result(answers, (layers, requests)).made
        assert 0 < made[25] <= 40 + 3 * requests + 2 * layers, made
