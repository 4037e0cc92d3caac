"""Requests with budgets of their own, side by side: what each gives and keeps is what it gives alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import keepset
from keepset import Recipe
from tests.vllm.compared import answers_of, check_transformers, fed, result
from tests.vllm.engine import Ask, Result, Scenario
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle
from tests.vllm.test_tiny import ENGINE, EQUAL, FROM_DATA, IDS

settings = Late("keepset.vllm.settings")
options = Late("keepset.vllm.request_options")

OWN: list[dict[str, Any] | None] = [
    None,
    {"keep": 24},
    {"off": True},
    {"protect": [[3, 20], [50, 77]]},
    {"keep": 64, "protect": [[0, 30]]},
    {"keep": 500},
    {"keep": 30, "protect": [[2 * i, 2 * i + 1] for i in range(1024)]},
]
FRACTIONS = [None, {"keep": 0.5}, {"off": True}, {"protect": [[3, 60]]}, {"keep": 0.25, "protect": [[0, 9]]}]


def asks(own: list[dict[str, Any] | None], tokens: int = 40, **more: Any) -> list[Ask]:
    return [
        Ask(IDS[311 * i : 311 * i + size], tokens, extra=None if request is None else {"keepset": request}, **more)
        for i, (request, size) in enumerate(zip(own, (90, 150, 120, 200, 131, 160, 33), strict=False))
    ]


TURMOIL = [
    *asks(OWN),
    Ask(IDS[:150], 30, add=3, extra={"keepset": {"keep": 24}}, abort=4),  # before it begins
    Ask(IDS[:150], 30, add=5, extra={"keepset": '{"keep": 33}'}),
    Ask(IDS[:150], 30, add=10, extra={"keepset": {"off": True}}, abort=30),
    Ask(IDS[:150], 30, add=36),
]
REFUSED = [
    Ask(IDS[:40], 5, extra={"keepset": request})
    for request in (
        {"keep": 0.5},
        {"keep": 4},
        {"keep": "half"},
        {"protect": [[5, 5]]},
        {"context": "manual"},
        {"more": 1},
        {"save": "a"},
        {"keep": 24, "owner": "1" * 32},
        {"off": True, "ticket": "1" * 32},
        {"protect": [[2 * i, 2 * i + 1] for i in range(2000)]},
        json.dumps({"protect": [[2 * i, 2 * i + 1] for i in range(2000)]}),
        [24],
        24,
    )
]
PREEMPT = (9, 33)
CHUNKED = {"max_num_batched_tokens": 96}
BEGINNING = [Ask(IDS[:170], 24, add=20 * i, extra=own) for i, own in enumerate([None, {"keepset": {"keep": 30}}, None])]


def scenario(tiny: Path, recipe: str, some: list[Ask], preempt: tuple[int, ...] = (), **more: Any) -> Scenario:
    engine = {
        "model": str(tiny),
        **ENGINE,
        **CHUNKED,
        "kv_transfer_config": settings.CONNECTOR,
        **more.pop("engine", {}),
    }
    return Scenario(recipe, some, preempt, engine, **more)


@pytest.fixture(scope="module")
def engines(tiny: Path) -> dict[str, Any]:
    return answers_of({"equal": scenario(tiny, EQUAL, [*asks(OWN), *REFUSED])})


RECIPES = {
    "turmoil": EQUAL,
    "ragged": "adakv(snapkv(window=8), keep=40, every=12)",
    "layers": "pyramid(snapkv(window=8), keep=48, every=8)",
    "data": FROM_DATA,
    "across": "pool(snapkv(window=8), keep=48, every=16)",
    "once": "h2o(keep=0.3)",
    "cramped": EQUAL,
    "apart": EQUAL,
    "shared": EQUAL,
    "ahead": EQUAL,
}


@pytest.fixture(scope="module")
def others(tiny: Path) -> dict[str, Any]:
    more: dict[str, dict[str, Any]] = {
        "cramped": {"engine": {"num_gpu_blocks_override": 18}},
        "apart": {"own_process": True},
        "ahead": {"engine": {"async_scheduling": True}, "stub_streams": True},
        "data": {"layer_groups": 2},
        "shared": {"engine": {"enable_prefix_caching": True}},
    }
    scenarios = {
        name: scenario(
            tiny, recipe, requests_of(name), PREEMPT if name in ("turmoil", "data") else (), **more.get(name, {})
        )
        for name, recipe in RECIPES.items()
    }
    ahead = {"ahead": scenarios.pop("ahead")}
    return answers_of(scenarios) | answers_of(ahead)


def requests_of(name: str) -> list[Ask]:
    if name == "once":
        return asks(FRACTIONS)
    if name == "shared":
        return BEGINNING
    if name == "data":
        return asks([None, {"keep": 24}, {"off": True}, {"protect": [[3, 20]]}])
    return TURMOIL if name in ("turmoil", "ahead", "cramped") else asks(OWN)


def own_recipe(recipe: str, one: Ask) -> Recipe | None:
    engine = Recipe.parse(recipe)
    return engine if one.extra is None else options.parse_options(one.extra["keepset"]).recipe(engine)


@torch.no_grad()
def check(recipe: str, some: list[Ask], engine: Result, model: PreTrainedModel, oracle: Oracle) -> None:
    """Each request's tokens and kept entries are those that its own recipe gives, in the same steps."""
    for index, one in enumerate(some):
        own, tokens = own_recipe(recipe, one), engine.tokens[index] or []
        assert one.abort is not None or len(tokens) == one.max_tokens
        if own is None:
            whole = torch.tensor([one.ids + tokens])
            assert model(whole).logits[0, len(one.ids) - 1 : -1].argmax(-1).tolist() == tokens
            assert not any(engine.events[index:][:1])
            continue
        if not engine.log:  # nobody watched
            cache = keepset.Cache(model, own, prompt_length=len(one.ids))
            assert fed(model, cache, own, one.ids, tokens) == tokens
            continue
        replay = oracle.replay(own, one.ids, tokens, engine.steps_of(index))
        assert replay.best == tokens
        assert engine.events_of(index) == replay.events
    if engine.log:
        engine.check_nothing_left()


def test_each_is_compressed_by_its_own(
    engines: dict[str, Any], tiny_model: PreTrainedModel, tiny_oracle: Oracle
) -> None:
    engine, own = result(engines, "equal"), asks(OWN)
    check(EQUAL, own, engine, tiny_model, tiny_oracle)
    assert max(step["running"] for step in engine.steps) >= 6
    for index, one in enumerate(own):
        if (recipe := own_recipe(EQUAL, one)) is not None:
            check_transformers(tiny_model, recipe, own, engine, [index])


def test_what_cannot_be_ends_with_an_error(engines: dict[str, Any]) -> None:
    engine = result(engines, "equal")
    assert engine.reasons[len(OWN) :] == ["error"] * len(REFUSED) and not any(engine.tokens[len(OWN) :])


@pytest.mark.full
@pytest.mark.parametrize("name", list(RECIPES))
def test_in_turmoil(name: str, others: dict[str, Any], tiny_model: PreTrainedModel, tiny_oracle: Oracle) -> None:
    engine, some = result(others, name), requests_of(name)
    check(RECIPES[name], some, engine, tiny_model, tiny_oracle)
    if name == "turmoil":
        assert min(engine.preemptions[:5]) == 2 and not engine.tokens[7]
    if name == "shared":
        assert engine.cached[1] == 0 and (engine.cached[2] or 0) > 0
    if name == "cramped":
        assert min(step["free"] for step in engine.steps) < 4 and any(step["waiting"] for step in engine.steps)
