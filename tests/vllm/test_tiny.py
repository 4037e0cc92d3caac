"""The fast tier: each way to choose and to hold entries, and each turn of a request's life, in engines of a tiny model.

Every token and every kept entry is the reference's and the transformers runtime's. All engines run in one process.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.vllm.compared import answers_of, check_oracle, check_transformers, result
from tests.vllm.engine import BLOCK, Ask, Result, Scenario, raw
from tests.vllm.oracle import Oracle

EQUAL = "snapkv(window=8, keep=40, every=16)"
FROM_DATA = "mass(share=0.8, every=16)"
ONCE = [
    "snapkv(window=8, keep=40)",
    EQUAL,
    "snapkv(window=8, keep=40, every=16, protect_prompt=True)",
    "adakv(snapkv(window=8), keep=40, every=12)",
    "pyramid(snapkv(window=8), keep=48, every=8)",
    FROM_DATA,
    "ams(tova, window=16, keep=48, every=16)",
    "pool(snapkv(window=8), keep=48, every=16)",
    "compilerkv(window=8, threshold='mean', keep=60)",
    "compilerkv(window=8, elastic=False, global_mean=False, keep=40, every=16)",
    "expected_attention(keep=40, buffer=24, every=16)",
    "gvote",
    "h2o(keep=0.3)",
    "loud(keep=40, every=12)",
]
"""Undisturbed: heads and layers that keep equally many or not, counts that the data decide, and what is looked at."""
FITTED = [
    "match(snapkv(window=8), biases=False, keep=40)",
    "match(adakv(snapkv(window=8)), biases=False, window=8, keep=40, every=12)",
    "match(snapkv(window=8), keep=40)",
    "match(adakv(snapkv(window=8)), window=8, keep=40, every=12)",
]
"""What stays gets other values, and biases, of which the reference knows nothing."""
LENGTHS, TOKENS = (150, 90, 230), 40
ENGINE: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 96}
CHUNKED = {"max_num_batched_tokens": 128}
IDS = torch.randint(3, 512, (4000,), generator=torch.Generator().manual_seed(0)).tolist()

UNDISTURBED = [Ask(IDS[500 * i : 500 * i + n], TOKENS) for i, n in enumerate(LENGTHS)]
TURMOIL = [
    Ask(IDS[0:130], 50),
    Ask(IDS[200:250], 50),
    Ask(IDS[300:480], 40),
    Ask(IDS[500:570], 40, abort=25),  # while it decodes
    Ask(IDS[600:900], 30, add=20, abort=22),  # while its prompt is computed
    Ask(IDS[900:1000], 30, add=24),
]
PREEMPT = (12, 33)
CRAMPED = [Ask(IDS[500 * i : 500 * i + n], 90) for i, n in enumerate((100, 50, 70, 60))]
SHARING = [
    Ask(IDS[0:200], 40),
    Ask(IDS[0:150] + IDS[1000:1010], 30, add=10),
    Ask(IDS[0:200], 30, add=20),
    Ask(IDS[0:260], 10, add=22),  # which could have more of the first's pages, had nothing been written to them
]
ALONE = [Ask(IDS[:200], 100)]


def few_blocks(number: int, **more: Any) -> dict[str, Any]:
    return {"num_gpu_blocks_override": number, "max_num_batched_tokens": 64, "max_model_len": 256, **more}


LIFE = {
    "turmoil": Scenario(EQUAL, TURMOIL, PREEMPT, {"max_num_batched_tokens": 96, "max_num_seqs": 5}),
    # Three layers in two groups, so that one of them is of several.
    "turmoil from data": Scenario(
        FROM_DATA, TURMOIL, PREEMPT, {"max_num_batched_tokens": 96, "max_num_seqs": 5}, layer_groups=2
    ),
    "cramped": Scenario(ONCE[0], CRAMPED, engine=few_blocks(12, enable_prefix_caching=True)),
    "cramped and foreseen": Scenario("snapkv(window=8, keep=32, every=16)", CRAMPED, engine=few_blocks(12)),
    "sharing": Scenario(EQUAL, SHARING, engine=CHUNKED | {"enable_prefix_caching": True}),
    "whole prompts": Scenario("h2o(keep=0.3)", SHARING, engine=CHUNKED | {"enable_prefix_caching": True}),
    "alone": Scenario(EQUAL, ALONE),
}
NO_RECIPE = Scenario(None, UNDISTURBED, engine=CHUNKED)


@pytest.fixture(scope="module")
def engines(tiny: Path) -> dict[str, Result]:
    scenarios = {recipe: Scenario(recipe, UNDISTURBED, engine=CHUNKED) for recipe in [*ONCE, *FITTED]} | LIFE
    # In the middle, so that one with a recipe comes before and after it.
    names = [*ONCE, *FITTED, "no recipe", *LIFE]
    scenarios["no recipe"] = NO_RECIPE
    for scenario in scenarios.values():
        scenario.engine.update({"model": str(tiny), **ENGINE, **scenario.engine})
    answers = answers_of({name: scenarios[name] for name in names})
    return {name: result(answers, name) for name in names}


@pytest.mark.parametrize("recipe", ONCE)
def test_it_is_the_reference(recipe: str, engines: dict[str, Result], tiny_oracle: Oracle) -> None:
    engine = engines[recipe]
    assert engine.classes == ["CPUKeepImpl"]
    assert all(engine.events) and engine.stats["entries_dropped"] > 0
    assert max(tokens for log in engine.log for _, _, tokens in log) < max(LENGTHS)  # in chunks
    check_oracle(tiny_oracle, recipe, UNDISTURBED, engine)


@pytest.mark.parametrize("recipe", [*ONCE, *FITTED])
def test_it_is_the_transformers_runtime(recipe: str, engines: dict[str, Result], tiny_model: PreTrainedModel) -> None:
    check_transformers(tiny_model, recipe, UNDISTURBED, engines[recipe])


def test_without_a_recipe_it_is_vllm(engines: dict[str, Result], tiny_oracle: Oracle) -> None:
    engine = engines["no recipe"]
    assert engine.classes == ["CPUAttentionBackendImpl"]
    assert not any(engine.events) and not any(engine.stats.values())
    check_oracle(tiny_oracle, None, UNDISTURBED, engine)


@pytest.mark.parametrize("name", LIFE)
def test_whatever_happens_it_is_the_reference(name: str, engines: dict[str, Result], tiny_oracle: Oracle) -> None:
    engine, scenario = engines[name], LIFE[name]
    assert scenario.recipe is not None
    check_oracle(tiny_oracle, scenario.recipe, list(scenario.requests), engine)


@pytest.mark.parametrize("name", ["turmoil", "turmoil from data"])
def test_preemptions_aborts_and_arrivals(name: str, engines: dict[str, Result]) -> None:
    engine = engines[name]
    assert engine.preemptions[:3] == [2, 2, 2] and engine.preemptions[5] == 1
    assert engine.tokens[3] and len(engine.tokens[3]) < TURMOIL[3].max_tokens
    assert engine.log[4] and not engine.tokens[4]


def test_a_pool_that_is_too_small_for_all(engines: dict[str, Result]) -> None:
    assert sum(engines["cramped"].preemptions) > 0
    # What requests will hold at the worst moment is known when one is admitted: none is thrown out again.
    foreseen = engines["cramped and foreseen"]
    assert sum(foreseen.preemptions) == 0
    assert min(step["free"] for step in foreseen.steps) < 4


def test_prefixes_are_shared_as_far_as_nothing_writes_to_them(engines: dict[str, Result]) -> None:
    assert engines["sharing"].cached == [0, 96, 160, 160]
    assert engines["whole prompts"].cached == [0, 0, 0, 0]  # of shared pages it would not see the queries
    assert engines["sharing"].events[0][0]["step"] < engines["sharing"].log[1][0][0]


def test_blocks_are_freed_as_soon_as_they_are_empty(engines: dict[str, Result]) -> None:
    """One request, counted by hand: a step holds all blocks of its text but those that events before it emptied."""
    engine = engines["alone"]
    events = range(200, 300, 16)
    assert [event["at"] for event in engine.events[0]] == list(events)
    lengths = list(accumulate(tokens for _, tokens in engine.steps_of(0)))
    assert lengths == list(range(200, 300))
    dropped = [max((at - 40 for at in events if at < length), default=0) for length in lengths]
    held = [engine.free_before - step["free"] for step in engine.steps]
    assert held == [-(-length // BLOCK) - gone // BLOCK for length, gone in zip(lengths, dropped, strict=True)]
    assert engine.stats["blocks_freed"] == (events[-1] - 40) // BLOCK
    heads, layers = 2, 3
    assert engine.stats["events"] == len(events)
    assert engine.stats["entries_kept"] == len(events) * 40 * heads * layers


def test_engines_that_are_refused_say_why(tiny: Path) -> None:
    ask, own = [Ask([1, 2, 3], 1)], {"model": str(tiny), **ENGINE}
    answers = raw(
        Scenario("gvote", ask, engine=own | {"enforce_eager": False}),
        Scenario("pyramid(snapkv, keep=128)", ask, engine=own | {"enable_prefix_caching": True}),
        Scenario("adakv(snapkv, keep=0.25)", ask, engine=own | {"kv_cache_dtype": "fp8"}),
        Scenario("mass", ask, engine=own | {"kv_transfer_config": None}),
        Scenario(None, ask, engine=own | {"additional_config": {"keepset": "snapkv(kep=0.25)"}}),
    )
    sentences = [
        "EngineError: keepset cannot serve gvote: compiled code does not show the hidden states that it looks at",
        "EngineError: keepset cannot serve pyramid(snapkv, keep=128): its layers keep different numbers of entries",
        "EngineError: keepset cannot serve adakv(snapkv, keep=0.25): heads that keep different entries",
        "EngineError: keepset cannot serve mass: how much it keeps depends on the data",
        "RecipeError: snapkv has no parameter 'kep'",
    ]
    for answer, sentence in zip(answers, sentences, strict=True):
        assert isinstance(answer, str) and sentence in answer, answer
