"""Each way to choose and to hold entries, and each turn of a request's life, in engines of a tiny model.

Every token and every kept entry is the reference's and the transformers runtime's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from keepset.core.statistics import save
from keepset.lab import texts
from keepset.lab.calibrate.corpus import Corpus
from keepset.lab.calibrate.measure import measure
from tests.methods.naive import random_predictor
from tests.tiers import FULL
from tests.vllm.compared import CHUNKED, IDS, Embedded, answers_of, check_oracle, check_transformers, full, result
from tests.vllm.engine import BLOCK, Ask, Result, Scenario, raw, run
from tests.vllm.oracle import Oracle

EQUAL = "snapkv(window=8, keep=40, every=16)"
RAGGED = "adakv(snapkv(window=8), keep=40, every=12)"
LAYERS_DIFFER = "pyramid(snapkv(window=8), keep=48, every=8)"
FROM_DATA = "mass(share=0.8, every=16)"
MOMENTS = "expected_attention(keep=40, buffer=40, every=20)"
ACROSS = "pool(snapkv(window=8), keep=48, every=16)"
ONCE, WHOLE_PROMPTS = "snapkv(window=8, keep=40)", "h2o(bytes=0.3)"
NETWORKS = "adakv(distilled(stats='FILE'), keep=40, every=12)"
SEGMENTS = "ams(tova, window=16, keep=48, every=16)"
REMEMBERING = "loud(keep=40, every=12)"
RECIPES = [
    *(RAGGED, LAYERS_DIFFER, ACROSS, REMEMBERING, NETWORKS, "gvote"),
    "expected_attention(keep=40, buffer=24, every=16)",  # of so few queries moments would weigh more than they
]
"""Undisturbed: heads and layers that keep equally many or not, counts that the data decide, and what is looked at."""
OF_BOTH = ("adakv(distilled", "pyramid")
"""What the fast tier compares with the transformers runtime as well, together with `FITTED`."""
MORE = [
    EQUAL,
    *("knorm(keep=60, sinks=2, recent=7)", "random(keep=0.3)", "r_kv(keep=40, every=5)"),
    *("adakv(expected_attention, bytes=0.2)", "glance(keep=0.25)", "kvcompose(task='self', keep=0.25)"),
    "tova(keep=50, prefill=False, every=12)",
    "snapkv(window=8, keep=40, every=16, protect_prompt=True)",
    "compilerkv(window=8, elastic=True, keep=60)",
    "compilerkv(window=8, elastic=False, global_mean=False, keep=40, every=16)",
    "triattention(stats='FILE', keep=40, every=12)",
    "adakv(qfilter(stats='FILE'), keep=0.3, recent=8)",
    "expected_attention(stats='FILE', keep=40, every=12)",
    "distilled(stats='FILE', threshold=1.5, keep=70, every=16)",
    "pool(distilled(stats='FILE'), bytes=0.25)",
]
"""`FILE` holds statistics of the model, with random networks. Others are held against the reference in turmoil."""
FITTED = [
    "match(adakv(snapkv(window=8)), window=8, keep=40, every=12)",
    "match(snapkv(window=8), biases=False, keep=40)",
]
"""What stays gets other values, and biases, of which the reference knows nothing."""
UNTOUCHED = ["snapkv(window=8, keep=1024, every=16)", "adakv(knorm, keep=1.0)"]
"""Everything may stay."""
LENGTHS, TOKENS = (150, 90, 230), 40 if FULL else 30
ENGINE: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 96}

UNDISTURBED = [Ask(IDS[500 * i : 500 * i + n], TOKENS) for i, n in enumerate(LENGTHS)]
TURMOIL = [
    Ask(IDS[0:130], 50),
    Ask(IDS[200:250], 50),
    Ask(IDS[300:480], 40),
    Ask(IDS[500:570], 40, abort=25),  # while it decodes
    Ask(IDS[600:900], 30, add=20, abort=22),  # while its prompt is computed
    Ask(IDS[900:1000], 30, add=24),
]
CRAMPED = [Ask(IDS[500 * i : 500 * i + n], 90) for i, n in enumerate((100, 50, 70, 60))]
GROWING = [Ask(IDS[500 * i : 500 * i + n], 110) for i, n in enumerate((30, 10, 50, 20))]
"""Prompts below the budget, which are let in together and do not fit once they have grown to it."""
URGENT = [Ask(IDS[500 * i : 500 * i + 100], 90, priority=2 - i) for i in range(3)]
SHARING = [
    Ask(IDS[0:200], 40),
    Ask(IDS[0:150] + IDS[1000:1010], 30, add=10),
    Ask(IDS[0:200], 30, add=20),
    Ask(IDS[0:260], 10, add=22),  # which could have more of the first's pages, had nothing been written to them
]
TOGETHER = [Ask(IDS[0:200], 10), Ask(IDS[0:165] + IDS[1000:1035], 10)]
"""Prompts that begin with the same pages and end in one step: sums of entries in these pages are each request's own."""


def few_blocks(number: int, **more: Any) -> dict[str, Any]:
    return {"num_gpu_blocks_override": number, "max_num_batched_tokens": 64, "max_model_len": 256, **more}


def turmoil(recipe: str, groups: int | None = None, **more: Any) -> Scenario:
    engine = {"max_num_batched_tokens": 96, "max_num_seqs": 5, **more}
    return Scenario(recipe, TURMOIL, (12, 33), engine, layer_groups=groups)


SHARED = {"max_num_batched_tokens": 128, "enable_prefix_caching": True}
LIFE = {
    "turmoil": turmoil(EQUAL),
    "turmoil from data": turmoil(FROM_DATA, 2),  # three layers in two groups, so that one of them is of several
    "cramped": Scenario(ONCE, CRAMPED, engine=few_blocks(12, enable_prefix_caching=True)),
    "cramped and foreseen": Scenario("snapkv(window=8, keep=32, every=16)", CRAMPED, engine=few_blocks(12)),
    "sharing": Scenario(EQUAL, SHARING, engine=SHARED),
    "alone": Scenario(EQUAL, [Ask(IDS[:200], 100)]),
}
MORE_LIFE = {
    "turmoil of ragged heads": turmoil(RAGGED),
    "turmoil of moments": turmoil(MOMENTS),
    "turmoil of segments": turmoil(SEGMENTS),
    "turmoil of what is remembered": turmoil(REMEMBERING),
    "turmoil of networks": turmoil(NETWORKS),
    "turmoil of whole prompts": turmoil(WHOLE_PROMPTS, enable_prefix_caching=True),
    "turmoil across layers": turmoil(ACROSS),
    "growing": Scenario("adakv(snapkv(window=8), keep=60, every=16)", GROWING, engine=few_blocks(12)),
    "urgent": Scenario(ONCE, URGENT, engine=few_blocks(12, scheduling_policy="priority")),
    "sharing of ragged heads": Scenario(RAGGED, SHARING, engine=SHARED),
    "whole prompts": Scenario(WHOLE_PROMPTS, SHARING, engine=SHARED),
    "sharing of networks": Scenario("distilled(stats='FILE', keep=40, every=16)", SHARING, engine=SHARED),
    "sharing until it decodes": Scenario("snapkv(window=8, keep=40, every=16, prefill=False)", SHARING, engine=SHARED),
    "short prompts": Scenario("snapkv(window=8, keep=0.3, short=100)", UNDISTURBED, engine=CHUNKED),
    "short prompts from data": Scenario("pool(snapkv, bytes=0.25, short=100)", UNDISTURBED, engine=CHUNKED),
    "short prompts, every": Scenario(
        "adakv(snapkv(window=8), keep=40, every=12, short=100)", UNDISTURBED, engine=CHUNKED
    ),
    "together": Scenario(ONCE, TOGETHER, engine=SHARED | {"max_num_batched_tokens": 512}),
}


def undisturbed(recipes: list[str]) -> dict[str, Scenario]:
    return {recipe: Scenario(recipe, UNDISTURBED, engine=CHUNKED) for recipe in recipes}


# Without a recipe in the middle, so that one with a recipe comes before and after it.
GROUPS = [
    undisturbed([*RECIPES, FITTED[0]]) | {"no recipe": Scenario(None, UNDISTURBED, engine=CHUNKED)} | LIFE,
    undisturbed([*MORE, FITTED[1], *UNTOUCHED]),
    MORE_LIFE,
]


@pytest.fixture(scope="module")
def file(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statistics") / "stats.safetensors"
    measured = measure(tiny_model, Corpus(list(torch.tensor(IDS[1024:2048]).view(4, 256)), "0", 0))
    draw = torch.Generator().manual_seed(0)
    networks = {index: random_predictor(2, 64, draw) for index in measured.layers}
    save(replace(measured, predictors=networks), path)
    return path


@pytest.fixture(scope="module")
def engine_of(tiny: Path, file: Path) -> Callable[[str], Result]:
    """What the engine of a name did; those of a group run one after another in one process."""
    answers: dict[str, Any] = {}

    def ready(scenario: Scenario) -> Scenario:
        recipe = scenario.recipe and scenario.recipe.replace("FILE", str(file))
        return replace(scenario, recipe=recipe, engine={"model": str(tiny), **ENGINE, **scenario.engine})

    def find(name: str) -> Result:
        if name not in answers:
            (group,) = [group for group in GROUPS if name in group]
            answers.update(answers_of({each: ready(scenario) for each, scenario in group.items()}))
        return result(answers, name)

    return find


EngineOf = Callable[[str], Result]


@pytest.mark.parametrize("recipe", [*RECIPES, *full(MORE)])
def test_it_is_the_reference(
    recipe: str, engine_of: EngineOf, file: Path, tiny_oracle: Oracle, tiny_model: PreTrainedModel
) -> None:
    engine = engine_of(recipe)
    assert engine.classes == ["CPUKeepImpl"]
    assert all(engine.events) and engine.stats["entries_dropped"] > 0
    assert max(tokens for log in engine.log for _, _, tokens in log) < max(LENGTHS)  # in chunks
    recipe = recipe.replace("FILE", str(file))
    check_oracle(tiny_oracle, recipe, UNDISTURBED, engine)
    if FULL or recipe.startswith(OF_BOTH):
        check_transformers(tiny_model, recipe, UNDISTURBED, engine)


@pytest.mark.parametrize("recipe", [FITTED[0], *full(FITTED[1:])])
def test_it_is_the_transformers_runtime(recipe: str, engine_of: EngineOf, tiny_model: PreTrainedModel) -> None:
    check_transformers(tiny_model, recipe, UNDISTURBED, engine_of(recipe))


@pytest.mark.full
@pytest.mark.parametrize("recipe", [EQUAL, RAGGED])
def test_all_layers_of_a_real_model(recipe: str, embedded: Embedded) -> None:
    ask = Ask(embedded[1](texts.essay()[:2000])["input_ids"][:128], 8)
    (engine,) = run(Scenario(recipe, [ask]))
    check_transformers(embedded[0], recipe, [ask], engine)
    assert len(engine.events[0]) == 1 and len(engine.events[0][0]["layers"]) == embedded[0].config.num_hidden_layers
    check_oracle(Oracle(embedded[0], BLOCK), recipe, [ask], engine)


def test_without_a_recipe_it_is_vllm(engine_of: EngineOf, tiny_oracle: Oracle) -> None:
    engine = engine_of("no recipe")
    assert engine.classes == ["CPUAttentionBackendImpl"]
    assert not any(engine.events) and not any(engine.stats.values())
    check_oracle(tiny_oracle, None, UNDISTURBED, engine)


@pytest.mark.full
def test_without_the_plug_in_and_where_everything_may_stay_nothing_is_other(tiny: Path, engine_of: EngineOf) -> None:
    engine = engine_of("no recipe")
    alone = Scenario(None, UNDISTURBED, engine={"model": str(tiny), **ENGINE, **CHUNKED})
    plain = result(answers_of({"": alone}, env={"VLLM_PLUGINS": ""}), "")
    assert (engine.tokens, engine.log, engine.steps) == (plain.tokens, plain.log, plain.steps)
    assert engine.classes == plain.classes
    for recipe in UNTOUCHED:
        engine = engine_of(recipe)
        assert engine.classes == ["CPUKeepImpl"]
        assert (engine.tokens, engine.steps) == (plain.tokens, plain.steps)
        assert not any(engine.events) and not any(engine.stats.values())
        engine.check_nothing_left()


@pytest.mark.parametrize("name", [*LIFE, *full(MORE_LIFE)])
def test_whatever_happens_it_is_the_reference(name: str, engine_of: EngineOf, file: Path, tiny_oracle: Oracle) -> None:
    engine, scenario = engine_of(name), (LIFE | MORE_LIFE)[name]
    assert scenario.recipe is not None
    check_oracle(tiny_oracle, scenario.recipe.replace("FILE", str(file)), list(scenario.requests), engine)
    if name.startswith("turmoil"):
        assert engine.preemptions[:3] == [2, 2, 2] and engine.preemptions[5] == 1
        assert engine.tokens[3] and len(engine.tokens[3]) < TURMOIL[3].max_tokens
        assert engine.log[4] and not engine.tokens[4]


def test_a_pool_that_is_too_small_for_all(engine_of: EngineOf) -> None:
    assert sum(engine_of("cramped").preemptions) > 0
    # What requests will hold at the worst moment is known when one is admitted: none is thrown out again.
    foreseen = engine_of("cramped and foreseen")
    assert sum(foreseen.preemptions) == 0
    assert min(step["free"] for step in foreseen.steps) < 4


@pytest.mark.full
def test_who_gives_way_in_a_pool_that_is_too_small(engine_of: EngineOf) -> None:
    assert sum(engine_of("growing").preemptions) > 0 and all(engine_of("growing").events)
    first, *others = engine_of("urgent").preemptions
    assert first > 0 and others == [0, 0]


def test_prefixes_are_shared_as_far_as_nothing_writes_to_them(engine_of: EngineOf) -> None:
    sharing = engine_of("sharing")
    assert sharing.cached == [0, 96, 160, 160]
    assert sharing.events[0][0]["step"] < sharing.log[1][0][0]


@pytest.mark.full
def test_prefixes_are_shared_under_other_recipes(engine_of: EngineOf) -> None:
    assert engine_of("sharing of ragged heads").cached == [0, 64, 128, 128]
    assert engine_of("sharing until it decodes").cached == [0, 128, 160, 160]
    for name in ("whole prompts", "turmoil of whole prompts"):  # of shared pages they would not see the queries
        assert not any(engine_of(name).cached)
    together = engine_of("together")
    assert together.cached == [0, 160] and [log[0][2] for log in together.log] == [200, 40]


def test_blocks_are_freed_as_soon_as_they_are_empty(engine_of: EngineOf) -> None:
    """One request, counted by hand: a step holds all blocks of its text but those that events before it emptied."""
    engine = engine_of("alone")
    events = range(200, 300, 16)
    assert [event["at"] for event in engine.events[0]] == list(events)
    lengths = list(accumulate(tokens for _, tokens in engine.steps_of(0)))
    assert lengths == list(range(200, 300))
    dropped = [max((at - 40 for at in events if at < length), default=0) for length in lengths]
    held = [engine.free_before - step["free"] for step in engine.steps]
    assert held == [-(-length // BLOCK) - gone // BLOCK for length, gone in zip(lengths, dropped, strict=True)]
    assert engine.stats["blocks_freed"] == (events[-1] - 40) // BLOCK
    heads, layers = 2, 3
    assert engine.stats["events"] == len(events) and engine.stats["seconds"] > 0
    assert engine.stats["entries_kept"] == len(events) * 40 * heads * layers
    assert engine.stats["entries_dropped"] == (events[-1] - 40) * heads * layers


def test_engines_that_are_refused_say_why(tiny: Path) -> None:
    """Each at another place: the connector that is missing, compiled code, tables of layers, and the recipe's text."""
    ask, own = [Ask([1, 2, 3], 1)], {"model": str(tiny), **ENGINE}
    answers = raw(
        Scenario("gvote", ask, engine=own | {"enforce_eager": False}),
        Scenario("pyramid(snapkv, keep=128)", ask, engine=own | {"enable_prefix_caching": True}),
        Scenario(None, ask, engine=own | {"additional_config": {"keepset": "snapkv(kep=0.25)"}}),
    )
    sentences = [
        "EngineError: keepset cannot serve gvote: compiled code does not show the hidden states that it looks at",
        "EngineError: keepset cannot serve pyramid(snapkv, keep=128): its layers keep different numbers of entries",
        "RecipeError: snapkv has no parameter 'kep'",
    ]
    for answer, sentence in zip(answers, sentences, strict=True):
        assert isinstance(answer, str) and sentence in answer, answer
