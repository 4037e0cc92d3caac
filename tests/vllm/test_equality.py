"""Token for token, and entry for entry: what an engine keeps is what transformers keep.

Engines run in one process after another; a test reads what its engine did.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import keepset
from keepset import Recipe
from keepset.hf.recorder import Recorder
from keepset.observation import Needs
from tests.vllm.engine import Ask, Result, Scenario, layers_of, raw
from tests.vllm.oracle import Oracle, newest_event

LENGTHS = (300, 517, 150, 700)
SHORT_TOO = (300, 60, 517, 150)
CHUNKED = {"max_num_batched_tokens": 256}

AFTER_PREFILL = [
    "streaming_llm(keep=96)",
    "random(keep=0.3)",
    "knorm(keep=133, sinks=2, recent=7)",
    "tova(keep=97)",
    "snapkv(window=16, keep=0.25)",
    "expected_attention(keep=96)",
    "pyramid(snapkv(window=16), keep=128)",
    "adakv(snapkv(window=16), keep=96)",
    "adakv(expected_attention, keep=0.2)",
    "mass(share=0.8)",
    "loud(keep=80)",
]
EVERY = [
    "snapkv(window=16, keep=96, every=24)",
    "tova(keep=110, prefill=False, every=20)",
    "expected_attention(keep=64, buffer=40, every=24)",
    "adakv(snapkv(window=16), keep=96, every=17)",
    "pyramid(snapkv(window=16), keep=128, every=6)",
    "mass(share=0.8, every=24)",
    "loud(keep=80, every=16)",
    "snapkv(window=16, keep=96, every=24, protect_prompt=True)",
]
AMS = ["ams(tova, keep=96, every=32)", "ams(expected_attention(buffer=64), keep=96, every=32)"]
LONG = "snapkv(window=16, keep=96, every=64)"
UNTOUCHED = ["snapkv(window=16, keep=1024, every=16)", "adakv(knorm, keep=1.0)"]

# Equal tokens have keys of equal norms in the first layer, up to rounding, so that rounding alone would choose.
DISTINCT = "knorm(keep=133, sinks=2, recent=7)"

Embedded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def asks(essay: list[int], lengths: tuple[int, ...], tokens: int) -> list[Ask]:
    return [Ask(essay[137 * index : 137 * index + length], tokens) for index, length in enumerate(lengths)]


def result(answers: dict[str, Any], recipe: str) -> Result:
    answer = answers[recipe]
    assert isinstance(answer, dict), answer
    return Result(**answer)


def asks_of(recipe: str | None, prompts: list[Ask]) -> list[Ask]:
    if recipe != DISTINCT:
        return prompts
    ids = (torch.randperm(40000, generator=torch.Generator().manual_seed(6)) + 1000).tolist()
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    return [Ask(ids[start : start + length], 24) for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def prompts(essay: list[int]) -> list[Ask]:
    return asks(essay, LENGTHS, 24)


@pytest.fixture(scope="module")
def engines(prompts: list[Ask]) -> dict[str, Any]:
    recipes = [*AFTER_PREFILL, *UNTOUCHED]
    scenarios = [Scenario(recipe, asks_of(recipe, prompts), engine=CHUNKED) for recipe in (*recipes, None)]
    return dict(zip((*recipes, "none"), raw(*scenarios), strict=True))


@pytest.fixture(scope="module")
def decoding(essay: list[int]) -> dict[str, Any]:
    some = asks(essay, SHORT_TOO, 75)
    one = [Ask(essay[4000:4200], 512)]
    scenarios = [Scenario(recipe, some, engine=CHUNKED) for recipe in EVERY]
    return dict(zip((*EVERY, LONG), raw(*scenarios, Scenario(LONG, one)), strict=True))


@pytest.fixture(scope="module")
def reasoning(essay: list[int]) -> dict[str, Any]:
    """Long generations that live on what they keep."""
    return dict(zip(AMS, raw(*(Scenario(recipe, thoughts(essay), engine=CHUNKED) for recipe in AMS)), strict=True))


def thoughts(essay: list[int]) -> list[Ask]:
    return asks(essay, (70, 150, 310), 512)


@pytest.fixture(scope="module")
def plain(prompts: list[Ask]) -> Result:
    """vLLM alone."""
    (answer,) = raw(Scenario(None, prompts, engine=CHUNKED), env={"VLLM_PLUGINS": ""})
    assert isinstance(answer, dict), answer
    return Result(**answer)


@pytest.fixture(scope="module")
def recorded(embedded: Embedded, prompts: list[Ask]) -> list[tuple[Recorder, int]]:
    """Each prompt's prefill in transformers, from which any recipe may choose; and the first token."""
    needs = Needs()
    for recipe in AFTER_PREFILL:
        needs |= Recipe.parse(recipe).method.needs
    recorders = []
    for ask in prompts:
        recorder = Recorder(embedded[0], needs)
        recorders.append((recorder, int(recorder.prefill(torch.tensor([ask.ids])).argmax())))
    return recorders


def check_oracle(oracle: Oracle, recipe: str, some: list[Ask], engine: Result) -> None:
    """What was produced and kept is what the reference does in the same steps."""
    for index, ask in enumerate(some):
        tokens = engine.tokens[index]
        assert tokens is not None and len(tokens) == ask.max_tokens
        replay = oracle.replay(Recipe.parse(recipe), ask.ids, tokens, engine.steps_of(index))
        assert replay.best == tokens
        assert engine.events_of(index) == replay.events
    engine.check_nothing_left()


@torch.no_grad()
def fed(
    model: PreTrainedModel, cache: keepset.Cache, recipe: Recipe, prompt: list[int], tokens: list[int]
) -> list[int]:
    """The best token after each of a request's tokens, fed in pieces that end where the recipe compresses."""
    best, ids, start = [], prompt + tokens[:-1], cache.get_seq_length()
    for stop in range(start + 1, len(ids) + 1):
        if stop in (len(prompt), len(ids)) or newest_event(recipe, len(prompt), start, stop) == stop:
            logits = model(torch.tensor([ids[start:stop]]), past_key_values=cache, use_cache=True).logits[0]
            best += logits.argmax(-1).tolist()[max(len(prompt) - 1 - start, 0) :]
            start = stop
    return best


def check_cache(cache: keepset.Cache, engine: Result, index: int) -> None:
    """The engine kept what the transformers runtime keeps; events that drop nothing do not exist under vLLM."""
    events = [event for event in cache.events if event.kept < event.entries]
    assert [event.length for event in events] == [event["at"] for event in engine.events[index]]
    for event, other in zip(events, engine.events[index], strict=True):
        for layer, heads in layers_of(other).items():
            for head, positions in enumerate(heads):
                assert event.keep_set.positions(layer, 0, head).tolist() == positions


@pytest.mark.parametrize("recipe", AFTER_PREFILL)
def test_after_prefill_it_is_the_reference(
    recipe: str, engines: dict[str, Any], prompts: list[Ask], oracle: Oracle
) -> None:
    engine = result(engines, recipe)
    assert engine.classes == ["CPUKeepImpl"]
    assert [len(events) for events in engine.events] == [1] * len(prompts)
    assert not any(event["left"] for events in engine.events for event in events)
    assert max(tokens for log in engine.log for _, _, tokens in log) < max(LENGTHS)  # in chunks
    check_oracle(oracle, recipe, asks_of(recipe, prompts), engine)


@pytest.mark.parametrize("recipe", AFTER_PREFILL)
def test_after_prefill_it_is_the_transformers_runtime(
    recipe: str,
    engines: dict[str, Any],
    prompts: list[Ask],
    embedded: Embedded,
    recorded: list[tuple[Recorder, int]],
) -> None:
    engine = result(engines, recipe)
    for index, (ask, (recorder, first)) in enumerate(zip(asks_of(recipe, prompts), recorded, strict=True)):
        if recipe == DISTINCT:
            cache, best = keepset.Cache(embedded[0], recipe), []
        else:
            cache = keepset.Cache.from_prompt(embedded[0], recipe, recorder, recorder.observations)
            best = [first]
        tokens = engine.tokens[index]
        assert tokens is not None
        assert best + fed(embedded[0], cache, cache.recipe, ask.ids, tokens) == tokens
        check_cache(cache, engine, index)


@pytest.mark.parametrize("recipe", EVERY)
def test_while_decoding_it_is_the_reference(
    recipe: str, decoding: dict[str, Any], essay: list[int], oracle: Oracle
) -> None:
    engine = result(decoding, recipe)
    assert all(engine.events)
    check_oracle(oracle, recipe, asks(essay, SHORT_TOO, 75), engine)


@pytest.mark.parametrize("recipe", EVERY)
def test_while_decoding_it_is_the_transformers_runtime(
    recipe: str, decoding: dict[str, Any], essay: list[int], embedded: Embedded
) -> None:
    engine = result(decoding, recipe)
    for index, ask in enumerate(asks(essay, SHORT_TOO, 75)[1:3], start=1):
        if recipe.startswith(("loud", "adakv")) and len(ask.ids) < 80:
            # Under vLLM events do not exist that drop nothing, of which loud remembers what it saw, nor those of
            # ragged heads that drop less than a block: docs/serving.md, Limits.
            continue
        cache = keepset.Cache(embedded[0], recipe, history=True)
        tokens = engine.tokens[index]
        assert tokens is not None
        assert fed(embedded[0], cache, cache.recipe, ask.ids, tokens) == tokens
        check_cache(cache, engine, index)


@pytest.mark.parametrize("recipe", AMS)
def test_ams_over_long_generations(
    recipe: str, reasoning: dict[str, Any], essay: list[int], embedded: Embedded
) -> None:
    """Token for token; and the same entries but for near ties, of which a thousand events of heads have some.

    Quotas are rounded and masses summed up, so a last bit can move an entry's fate; what is gone stays gone.
    """
    engine = result(reasoning, recipe)
    engine.check_nothing_left()
    for index, ask in enumerate(thoughts(essay)):
        cache, tokens = keepset.Cache(embedded[0], recipe, history=True), engine.tokens[index]
        assert tokens is not None and len(engine.events[index]) >= 15
        assert fed(embedded[0], cache, cache.recipe, ask.ids, tokens) == tokens
        same = []
        for event, other in zip(cache.events[-len(engine.events[index]) :], engine.events[index], strict=True):
            assert event.length == other["at"] and event.keep_set is not None
            for layer, heads in layers_of(other).items():
                for head, positions in enumerate(heads):
                    mine = event.keep_set.positions(layer, 0, head).tolist()
                    assert len(mine) == len(positions) == 96
                    same.append(mine == positions)
        assert len(same) > 1000 and sum(same) > 0.98 * len(same)


def test_a_long_generation_stays_small(decoding: dict[str, Any], essay: list[int], oracle: Oracle) -> None:
    recipe = LONG
    engine = result(decoding, recipe)
    check_oracle(oracle, recipe, [Ask(essay[4000:4200], 512)], engine)
    assert [event["at"] for event in engine.events[0]] == list(range(200, 712, 64))
    used = [engine.free_before - step["free"] for step in engine.steps]
    # 96 kept, at most 64 new ones, and what they lie in the middle of; the prompt itself took 7.
    assert max(used[2:]) <= 6 and used[0] == 7


def test_without_a_recipe_it_is_vllm(engines: dict[str, Any], plain: Result) -> None:
    engine = result(engines, "none")
    assert engine.classes == plain.classes == ["CPUAttentionBackendImpl"]
    assert engine.tokens == plain.tokens
    assert engine.log == plain.log
    assert engine.steps == plain.steps
    assert not any(engine.stats.values())


def test_vllm_is_transformers(plain: Result, prompts: list[Ask], oracle: Oracle) -> None:
    for index, ask in enumerate(prompts):
        tokens = plain.tokens[index]
        assert tokens is not None
        assert oracle.replay(None, ask.ids, tokens, plain.steps_of(index)).best == tokens


@pytest.mark.parametrize("recipe", UNTOUCHED)
def test_where_everything_may_stay_nothing_changes(recipe: str, engines: dict[str, Any], plain: Result) -> None:
    engine = result(engines, recipe)
    assert engine.classes == ["CPUKeepImpl"]
    assert engine.tokens == plain.tokens
    assert engine.steps == plain.steps
    assert not any(engine.events) and not any(engine.stats.values())
    engine.check_nothing_left()


def test_events_are_counted_once_each(engines: dict[str, Any]) -> None:
    engine = result(engines, "streaming_llm(keep=96)")
    layers, heads = 30, 3
    assert engine.stats["events"] == len(LENGTHS)
    assert engine.stats["entries_kept"] == len(LENGTHS) * layers * heads * 96
    assert engine.stats["entries_dropped"] == sum(length - 96 for length in LENGTHS) * layers * heads
    assert engine.stats["blocks_freed"] == sum((length - 96) // 32 for length in LENGTHS)
    assert engine.stats["seconds"] > 0
