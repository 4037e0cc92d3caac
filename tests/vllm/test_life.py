"""Requests come, are preempted, aborted and finished, share prefixes and run out of pages, while others compress.

All that is checked is what matters to a user: every token and every kept entry is the reference's, which replays the
steps that the engine took, and at the end all pages are back.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from keepset import Recipe
from tests.vllm.compared import answers_of, check_oracle, result
from tests.vllm.engine import BLOCK, Ask, Scenario
from tests.vllm.oracle import Oracle

pytestmark = pytest.mark.full

EVENTFUL = [
    "snapkv(window=16, keep=96, every=24)",
    "adakv(snapkv(window=16), keep=96, every=24)",
    "expected_attention(keep=64, buffer=40, every=24)",
    "mass(share=0.8, every=24)",
    "loud(keep=80, every=16)",
    "ams(tova, window=32, keep=96, every=24)",
]
CRAMPED = [
    "snapkv(window=16, keep=96)",
    "adakv(snapkv(window=16), keep=96)",
    "snapkv(window=16, keep=64, every=32)",
]
SHARING = {
    "snapkv(window=16, keep=96, every=24)": [0, 224, 288, 0],
    "adakv(snapkv(window=16), keep=96, every=24)": [0, 192, 256, 0],
    "snapkv(window=64, keep=96, every=64, prefill=False)": [0, 256, 320, 0],
    "expected_attention(keep=96)": [0, 0, 0, 0],
}


TOGETHER = "snapkv(window=16, keep=96)"


IDS = torch.randint(3, 512, (2200,), generator=torch.Generator().manual_seed(1)).tolist()
"""Among which no two entries are as good for rounding to choose."""
GROWING = "adakv(snapkv(window=16), keep=160, every=32)"
URGENT = "snapkv(window=16, keep=96)"
LONG = "snapkv(keep=256)"


def turmoil(text: list[int]) -> list[Ask]:
    return [
        Ask(text[0:230], 90),
        Ask(text[300:360], 90),
        Ask(text[500:850], 70),
        Ask(text[900:1020], 60, abort=45),  # while it decodes
        Ask(text[1100:1500], 50, add=20, abort=22),  # while its prompt is computed
        Ask(text[1600:1790], 60, add=30),
    ]


def cramped(text: list[int]) -> list[Ask]:
    return [Ask(text[500 * i : 500 * i + n], 200) for i, n in enumerate((200, 60, 120, 90))]


def short(text: list[int]) -> list[Ask]:
    """Prompts far below the budget, which are let in together and do not fit once they have grown to it."""
    return [Ask(text[500 * i : 500 * i + n], 200) for i, n in enumerate((40, 10, 70, 25))]


def sharing(text: list[int]) -> list[Ask]:
    return [
        Ask(text[0:400], 70),
        Ask(text[0:320] + text[1000:1010], 40, add=15),
        Ask(text[0:400], 40, add=30),
        Ask(text[2000:2150], 40, add=10),
    ]


def together(text: list[int]) -> list[Ask]:
    """Requests whose prompts end in one step, and begin with the same pages."""
    return [Ask(text[0:400], 10), Ask(text[0:330] + text[1000:1070], 10)]


def urgent(text: list[int]) -> list[Ask]:
    return [Ask(text[500 * i : 500 * i + 150], 170, priority=2 - i) for i in range(3)]


@pytest.fixture(scope="module")
def disturbed(tiny: Path) -> dict[str, Any]:
    engine = {"model": str(tiny), "max_num_batched_tokens": 128, "max_num_seqs": 5}
    return answers_of({recipe: Scenario(recipe, turmoil(IDS), (25, 60), engine, layer_groups=2) for recipe in EVENTFUL})


@pytest.fixture(scope="module")
def crowded(tiny: Path) -> dict[str, Any]:
    engine = {"model": str(tiny), "max_num_batched_tokens": 64, "num_gpu_blocks_override": 20, "max_model_len": 512}
    shared = {"enable_prefix_caching": True}
    scenarios = {recipe: Scenario(recipe, cramped(IDS), engine=engine) for recipe in CRAMPED}
    others = {
        "shared": Scenario(CRAMPED[0], cramped(IDS), engine=engine | shared),
        "short": Scenario(GROWING, short(IDS), engine=engine),
    }
    return answers_of(scenarios | others)


@pytest.fixture(scope="module")
def prefixes(tiny: Path) -> dict[str, Any]:
    engine = {"model": str(tiny), "enable_prefix_caching": True, "max_num_batched_tokens": 128}
    scenarios = {recipe: Scenario(recipe, sharing(IDS), engine=engine) for recipe in SHARING}
    at_once = Scenario(TOGETHER, together(IDS), engine=engine | {"max_num_batched_tokens": 512})
    return answers_of(scenarios | {TOGETHER: at_once})


@pytest.fixture(scope="module")
def others(tiny: Path, shallow: Path) -> dict[str, Any]:
    small = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 27, "max_model_len": 512}
    priority = {"model": str(tiny), "scheduling_policy": "priority"} | small | {"num_gpu_blocks_override": 24}
    ids = torch.randint(1000, (4096,), generator=torch.Generator().manual_seed(0)).tolist()
    return answers_of(
        {
            URGENT: Scenario(URGENT, urgent(IDS), engine=priority),
            LONG: Scenario(LONG, [Ask(ids, 3)], engine={"model": str(shallow), "max_model_len": 8192}),
        }
    )


@pytest.mark.parametrize("recipe", EVENTFUL)
def test_preemptions_aborts_and_arrivals(recipe: str, disturbed: dict[str, Any], tiny_oracle: Oracle) -> None:
    engine, some = result(disturbed, recipe), turmoil(IDS)
    assert engine.preemptions[:3] == [2, 2, 2] and engine.preemptions[5] == 1
    assert engine.tokens[3] and len(engine.tokens[3]) < some[3].max_tokens
    assert engine.log[4] and not engine.tokens[4]
    check_oracle(tiny_oracle, recipe, some, engine)


def test_a_preempted_request_chooses_anew(disturbed: dict[str, Any]) -> None:
    """A preempted request starts from its whole text, so the newest event that its tokens pass is the only one."""
    engine = result(disturbed, EVENTFUL[0])
    ats = [event["at"] for event in engine.events[0]]
    starts_again = [place for place in range(1, len(engine.log[0])) if engine.log[0][place][1] == 0]
    assert len(starts_again) == 2
    assert any(later - earlier > 24 or later <= earlier for earlier, later in pairwise(ats))
    assert max(ats) == 230 + 72


@pytest.mark.parametrize("recipe", CRAMPED)
def test_a_pool_that_is_too_small_for_all(recipe: str, crowded: dict[str, Any], tiny_oracle: Oracle) -> None:
    engine = result(crowded, recipe)
    if Recipe.parse(recipe).schedule.every is None:
        assert sum(engine.preemptions) > 0
    else:
        # What requests will hold at the worst moment is known when one is admitted: none is thrown out again.
        assert sum(engine.preemptions) == 0
        assert min(step["free"] for step in engine.steps) < 6
    check_oracle(tiny_oracle, recipe, cramped(IDS), engine)


def test_a_preempted_request_and_a_prefix_cache(crowded: dict[str, Any], tiny_oracle: Oracle) -> None:
    engine = result(crowded, "shared")
    assert sum(engine.preemptions) > 0
    check_oracle(tiny_oracle, CRAMPED[0], cramped(IDS), engine)


def test_prompts_that_grow_to_the_budget_in_a_pool_that_is_too_small(
    crowded: dict[str, Any], tiny_oracle: Oracle
) -> None:
    engine = result(crowded, "short")
    assert sum(engine.preemptions) > 0 and all(engine.events)
    check_oracle(tiny_oracle, GROWING, short(IDS), engine)


@pytest.mark.parametrize("recipe", SHARING)
def test_prefixes_are_shared_with_compressed_requests(
    recipe: str, prefixes: dict[str, Any], tiny_oracle: Oracle
) -> None:
    engine = result(prefixes, recipe)
    first = engine.events[0][0]["step"]
    # The first request was compressed before the others came, and is compressed again while they run.
    assert first < engine.log[1][0][0] or not Recipe.parse(recipe).schedule.prefill
    assert engine.cached == SHARING[recipe]
    check_oracle(tiny_oracle, recipe, sharing(IDS), engine)


def test_prompts_that_share_pages_end_in_one_step(prefixes: dict[str, Any], tiny_oracle: Oracle) -> None:
    """Sums of entries in shared pages are each request's own."""
    engine = result(prefixes, TOGETHER)
    assert engine.cached == [0, 288] and [log[0][2] for log in engine.log] == [400, 112]
    check_oracle(tiny_oracle, TOGETHER, together(IDS), engine)


def test_the_least_urgent_gives_way(others: dict[str, Any], tiny_oracle: Oracle) -> None:
    engine = result(others, URGENT)
    assert engine.preemptions[0] > 0 and engine.preemptions[1:] == [0, 0]
    check_oracle(tiny_oracle, URGENT, urgent(IDS), engine)


def test_the_pages_of_a_long_prompt_go_at_once(others: dict[str, Any]) -> None:
    engine = result(others, LONG)
    event = engine.events[0][0]["step"]
    held = [engine.free_before - step["free"] for step in engine.steps]
    assert held[event] == 4096 // BLOCK
    assert held[event + 1] <= 2 * held[event] // 16
    assert engine.stats["blocks_freed"] == held[event] - 256 // BLOCK
    engine.check_nothing_left()
