"""Requests with budgets of their own, side by side: what each gives and keeps is what it gives alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepset import Recipe
from tests.vllm.compared import IDS, answers_of, check_oracle, full, result
from tests.vllm.engine import Ask, Scenario
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle
from tests.vllm.test_tiny import ACROSS, ENGINE, EQUAL, FROM_DATA, RAGGED, WHOLE_PROMPTS

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
FRACTIONS = [None, {"keep": 0.5}, {"off": True}, {"protect": [[3, 60]]}, {"bytes": 0.25, "protect": [[0, 9]]}]
MANY = {"protect": [[2 * i, 2 * i + 1] for i in range(2000)]}
REFUSED = [
    Ask(IDS[:40], 5, extra={"keepset": request})
    for request in (
        *({"keep": 0.5}, {"keep": 4}, {"keep": "half"}, {"protect": [[5, 5]]}, {"context": "manual"}, {"more": 1}),
        *({"save": "a"}, {"keep": 24, "owner": "1" * 32}, {"off": True, "ticket": "1" * 32}, MANY, json.dumps(MANY)),
        *({"protect": "image"}, {"protect": ["text", [5, 5]]}, {"protect": "images"}),
        *([24], 24),
    )
]


def asks(own: list[dict[str, Any] | None]) -> list[Ask]:
    return [
        Ask(IDS[311 * i : 311 * i + size], 40, extra=None if request is None else {"keepset": request})
        for i, (request, size) in enumerate(zip(own, (90, 150, 120, 200, 131, 160, 33), strict=False))
    ]


TURMOIL = [
    *asks(OWN),
    Ask(IDS[:150], 30, add=3, extra={"keepset": {"keep": 24}}, abort=4),  # before it begins
    Ask(IDS[:150], 30, add=5, extra={"keepset": '{"keep": 33}'}),
    Ask(IDS[:150], 30, add=10, extra={"keepset": {"off": True}}, abort=30),
    Ask(IDS[:150], 30, add=36),
]
BEGINNING = [Ask(IDS[:170], 24, add=20 * i, extra=own) for i, own in enumerate([None, {"keepset": {"keep": 30}}, None])]


def scenario(tiny: Path, recipe: str, some: list[Ask], preempt: tuple[int, ...] = (), **more: Any) -> Scenario:
    own = {"model": str(tiny), "max_num_batched_tokens": 96, "kv_transfer_config": settings.CONNECTOR}
    return Scenario(recipe, some, preempt, ENGINE | own | more.pop("engine", {}), **more)


SHORT = [Ask(IDS[40 * i : 40 * i + 40], 20, extra=own) for i, own in enumerate([None, {"keepset": {"keep": 100}}] * 6)]
"""Requests that end with 4 blocks each, long before their first event would let them hold 8."""

SCENARIOS: dict[str, tuple[str, list[Ask], dict[str, Any]]] = {
    "turmoil": (EQUAL, [*TURMOIL, *REFUSED], {"preempt": (9, 33)}),
    "ragged": (RAGGED, asks(OWN), {}),
    "data": (FROM_DATA, asks(OWN[:4]), {"layer_groups": 2, "preempt": (9, 33)}),
    "across": (ACROSS, asks(OWN), {}),
    "once": (WHOLE_PROMPTS, asks(FRACTIONS), {}),
    "cramped": (EQUAL, TURMOIL, {"engine": {"num_gpu_blocks_override": 18}}),
    "short": ("snapkv(window=8, keep=120, every=80)", SHORT, {"engine": {"num_gpu_blocks_override": 52}}),
    "shared": (EQUAL, BEGINNING, {"engine": {"enable_prefix_caching": True}}),
    "ahead": (EQUAL, TURMOIL, {"engine": {"async_scheduling": True}, "stub_streams": True}),
}
LATER = [name for name in SCENARIOS if name not in ("turmoil", "ahead")]


def run_all(tiny: Path, *names: str) -> dict[str, Any]:
    chosen = {name: SCENARIOS[name] for name in names}
    return answers_of({name: scenario(tiny, recipe, some, **more) for name, (recipe, some, more) in chosen.items()})


@pytest.fixture(scope="module")
def engines(tiny: Path) -> dict[str, Any]:
    return run_all(tiny, "turmoil")


@pytest.fixture(scope="module")
def others(tiny: Path) -> dict[str, Any]:
    return run_all(tiny, *LATER) | run_all(tiny, "ahead")


def test_each_is_compressed_by_its_own(engines: dict[str, Any], tiny_oracle: Oracle) -> None:
    engine = result(engines, "turmoil")
    check_oracle(tiny_oracle, EQUAL, TURMOIL, engine)
    assert max(step["running"] for step in engine.steps) >= 5
    assert min(engine.preemptions[:5]) == 2 and not engine.tokens[7]
    refused = slice(len(TURMOIL), None)
    assert engine.reasons[refused] == ["error"] * len(REFUSED) and not any(engine.tokens[refused])


@pytest.mark.parametrize("name", full([*LATER, "ahead"]))
def test_in_other_engines(name: str, others: dict[str, Any], tiny_oracle: Oracle) -> None:
    engine, (recipe, some, _) = result(others, name), SCENARIOS[name]
    check_oracle(tiny_oracle, recipe, some, engine)
    if name == "shared":
        assert engine.cached[1] == 0 and (engine.cached[2] or 0) > 0
    if name == "short":
        assert max(step["running"] for step in engine.steps) == len(SHORT)
    if name == "cramped":
        assert min(step["free"] for step in engine.steps) < 4 and any(step["waiting"] for step in engine.steps)


def test_ranges_are_added_to_those_of_the_recipe() -> None:
    engine = Recipe.parse("snapkv(keep=0.5, protect=[(0, 4)])")
    assert options.parse_options({"protect": [[9, 20]]}).recipe(engine).budget.protect == ((0, 4), (9, 20))


def test_a_budget_of_its_own_also_compresses_a_short_prompt() -> None:
    engine = Recipe.parse("snapkv(bytes=0.25, short=256)")
    assert options.parse_options({"keep": 64}).recipe(engine) == Recipe.parse("snapkv(keep=64)")
    assert options.parse_options({"protect": [[0, 4]]}).recipe(engine).budget.short == 256
