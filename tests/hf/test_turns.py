"""Caches that are compressed between turns: tokens and entries are those of a model that goes on head by head."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

import keepset
from keepset import Budget, Observation
from tests.hf.models import allocated, extended, feed, generate, padded_prompt, prompt, refusal, same_keep_set, tiny
from tests.hf.test_query_recorder import Both
from tests.vllm.chats import ChatTurn, Positions, replay
from tests.vllm.oracle import Oracle

ANSWERS = 12
SAID = [prompt(1, n, seed)[0].tolist() for seed, n in enumerate((60, 25, 40, 9, 30), start=1)]
"""What each turn adds."""
LEFT_OUT = {1: [(60, 66)], 3: [(20, 41), (80, 90)], 4: [(41, 50)]}
RECIPES = [
    "snapkv(window=8, bytes=0.4, turns=True)",
    "adakv(snapkv(window=8), keep=40, turns=True)",
    "pool(snapkv(window=8), bytes=0.3, turns=True)",
    "pyramid(snapkv(window=8), keep=0.5, turns=True)",
    "adakv(streaming_llm, keep=1.0, turns=True)",
    "tova(keep=0.3, turns=True)",
    "pool(snapkv(window=8), bytes=0.3, short=120, turns=True)",
]


def reference() -> Oracle:
    return Oracle(copy.deepcopy(tiny("llama")), 16)


def positions(cache: keepset.Cache) -> Positions:
    """The positions that each head of each layer has."""
    columns = {index: layer.store.padded() for index, layer in cache.managed_layers.items()}
    return {
        index: [row[exists].tolist() for row, exists in zip(parts["positions"][0], real[0], strict=True)]
        for index, (parts, real) in columns.items()
    }


def follow(
    cache: keepset.Cache,
    new: Sequence[list[int]],
    answers: int = ANSWERS,
    again: Sequence[int] = (),
    left_out: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    reworded: Mapping[int, int] | None = None,
    model: Any = None,
) -> list[ChatTurn]:
    """Follow a conversation with a cache that goes on; arguments are those of `replay`."""
    ids, gone, turns, asked = list[int](), set[int](), list[ChatTurn](), 0
    model = model or tiny("llama")

    def ask() -> None:
        progress = cache.progress
        begins_with, reused = ({}, 0) if progress is None else (positions(cache), progress.tokens[0] - len(gone))
        sequence = generate(model, torch.tensor([ids]), cache, max_new_tokens=answers).sequences[0]
        said = [token for position, token in enumerate(ids) if position not in gone]
        turns.append(ChatTurn(said, sequence[len(ids) :].tolist(), reused, begins_with))

    for number, added in enumerate(new):
        if number:
            said, goes_on = len(ids) - 1 - len(gone), (reworded or {}).get(number)
            if goes_on is not None:
                del ids[asked + goes_on :]
            cache.compact(said, None if goes_on is None else len(ids))
        spans = (left_out or {}).get(number, ())
        cache.leave_out(spans)
        gone |= {position for span in spans for position in range(*span)}
        ids += added
        asked = len(ids)
        ask()
        if number in again:
            cache.crop(len(ids) - 1)
            ask()
        ids += turns[-1].answer
    return turns


def check(recipe: str, answers: int = ANSWERS, new: Sequence[list[int]] = SAID, **options: Any) -> None:
    expected = replay(reference(), recipe, new, answers, **options)
    assert follow(keepset.Cache(tiny("llama"), recipe), new, answers, **options) == expected


@pytest.mark.few(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_goes_on_as_a_model_would(recipe: str) -> None:
    check(recipe)


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_a_turn_that_is_asked_for_again_is_answered_alike(recipe: str) -> None:
    check(recipe, again=(0, 2, 3))


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", RECIPES[2:])
def test_what_is_left_out_is_dropped(recipe: str) -> None:
    check(recipe, left_out=LEFT_OUT)


REWORDED = {1: 0, 2: 9, 4: 3}
"""How many tokens of an answer a client continues with before these turns."""


@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_turn_may_go_on_from_a_part_of_the_answer(recipe: str) -> None:
    check(recipe, reworded=REWORDED)


EVERY = [
    "snapkv(window=8, keep=40, every=5, turns=True)",
    "adakv(snapkv(window=8), keep=40, every=5, turns=True)",
    "pool(snapkv(window=8), keep=40, every=4, turns=True)",
    "expected_attention(buffer=5, skip=0, keep=40, every=5, turns=True)",
    "ams(snapkv(window=4), window=5, kernel=3, sinks=2, recent=4, keep=40, every=5, turns=True)",
    "r_kv(window=4, kernel=3, keep=40, every=5, turns=True)",
    "adakv(knorm, keep=40, every=11, turns=True)",
]


@pytest.mark.few(2)
@pytest.mark.parametrize("case", [{}, {"left_out": LEFT_OUT}, {"reworded": REWORDED}], ids=str)
@pytest.mark.parametrize("recipe", EVERY)
def test_a_long_answer_is_compressed_while_it_is_decoded(recipe: str, case: Any) -> None:
    check(recipe, **case)


@pytest.mark.parametrize("every", ["", "every=4, "])
@torch.no_grad()
def test_tokens_are_taken_back_from_each_request_of_a_batch(every: str) -> None:
    """Each row has what its request has alone, though its heads had dropped some of these tokens already."""
    model, (ids, mask), more = tiny("llama"), padded_prompt([0, 5], 40), prompt(2, 9, 3)

    def kept(rows: slice, padding: int) -> list[list[int]]:
        cache = keepset.Cache(model, f"adakv(snapkv(window=8), keep=20, {every}turns=True)")
        feed(model, cache, ids[rows, padding:], mask[rows, padding:])
        cache.compact(40, 30 - padding)
        for new in more[rows].split([1, 2, 3, 3], 1):  # the answer begins after the first
            length = cache.get_seq_length() + new.shape[1]
            feed(model, cache, new, extended(mask[rows, padding:30], length))
        assert [event.length + padding for event in cache.events] == [40, *([35, 39] if every else [])]
        heads = [layer.store.padded() for layer in cache.managed_layers.values()]
        return [
            [columns["positions"][i, head][real[i, head]].tolist() for columns, real in heads for head in range(2)]
            for i in range(len(more[rows]))
        ]

    batch = kept(slice(0, 2), 0)
    assert batch == kept(slice(0, 1), 0) + kept(slice(1, 2), 5)
    for length, heads in zip((30, 25), batch, strict=True):
        assert every or all(head[-9:] == list(range(length, length + 9)) and len(head) < 39 for head in heads)


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_answers_of_one_token(recipe: str) -> None:
    """Nothing of such an answer is fed: the turn ends with its prompt."""
    check(recipe, answers=1)


@pytest.mark.parametrize("padding", [[0], [0, 3]], ids=str)
@torch.no_grad()
def test_only_the_turns_own_queries_count(padding: list[int]) -> None:
    """Of windows longer than the turn, and after tokens were taken back only those since; sums are of these queries."""
    method, model, seen = Both(16), tiny("llama"), []

    def compare(observation: Observation, budget: Budget, kept: keepset.KeepSet) -> None:
        at = observation.newest_queries(16)[1][0]
        seen.append(at[at >= 0].tolist())
        for feature in method.sums:
            right = feature.made(observation, feature.window)
            ours, valid = observation[feature].attention_sums, observation.valid
            torch.testing.assert_close(ours[valid], right.attention_sums[valid], rtol=1e-5, atol=1e-6)

    cache = keepset.Cache(model, keepset.Recipe.of(method, keep=20, turns=True), observer=compare)
    ids, mask = padded_prompt(padding, 30)
    for tokens, kept in [(30, 30), (5, 5), (40, 38), (9, 2), (1, 1)]:
        new = ids if tokens == 30 else prompt(len(padding), tokens, tokens)
        mask = mask if tokens == 30 else extended(mask, mask.shape[1] + tokens)
        feed(model, cache, new, mask)
        if kept < tokens:
            cache.crop(-(tokens - kept + 1))
            mask = mask[:, : cache.get_seq_length() + 1]
            feed(model, cache, new[:, -1:], mask)
        cache.compact()
        length, queries = cache.get_seq_length(), 1 if kept < tokens else min(tokens, 16)
        assert seen == [list(range(length - queries, length))] * len(cache.managed_layers)
        seen.clear()


@pytest.mark.few(2)
@pytest.mark.parametrize("architecture", ["llama", "ministral3", "gpt2", "smollm3", "phi3_partial"])
@torch.no_grad()
def test_of_a_prompt_only_what_a_turns_end_looks_at_is_held(architecture: str) -> None:
    """However the tokens of a turn were fed, it looks at the same; of a whole prompt no hidden states stay."""
    model, (ids, mask), kept, excess = tiny(architecture), padded_prompt([0, 3], 60), [], []
    for parts in ([60], [59, 1]):
        cache = keepset.Cache(model, "adakv(expected_attention(buffer=20, skip=0), keep=20, turns=True)")
        for end, part in zip(accumulate(parts), parts, strict=True):
            feed(model, cache, ids[:, end - part : end], mask[:, :end])
        excess.append(allocated(cache) - cache.nbytes)
        cache.compact()
        kept.append(cache.keep_set)
    assert same_keep_set(*kept)
    assert excess[0] <= excess[1] + 2000  # bytes


def test_caches_between_turns() -> None:
    """Forks, saved files and other orders of requests compress alike; bytes are those allocated."""
    model, recipe = tiny("llama"), "adakv(snapkv(window=8), keep=20, turns=True)"
    cache, ids = keepset.Cache(model, recipe), prompt(2, 30)
    generate(model, ids, cache, max_new_tokens=12)
    assert allocated(cache) >= cache.nbytes > cache.nbytes_full
    fork, swapped = cache.fork(), cache.fork()
    swapped.reorder_cache(torch.tensor([1, 0]))
    for past in (cache, fork, swapped):
        past.compact()
    assert same_keep_set(cache.keep_set, fork.keep_set) and cache.keep_set.entries == 20 * 8
    swapped.reorder_cache(torch.tensor([1, 0]))
    assert positions(swapped) == positions(cache)
    event = cache.events[-1]
    cache.compact()
    assert cache.events[-1] is event  # nothing has come since


def test_a_saved_cache_goes_on(tmp_path: Path) -> None:
    """Its next turn is what follows in the loaded one."""
    model, recipe = tiny("llama"), "adakv(snapkv(window=8), keep=20, turns=True)"
    cache, ids = keepset.Cache(model, recipe), prompt(1, 30)
    ids = generate(model, ids, cache, max_new_tokens=12).sequences
    cache.compact()
    cache.save(tmp_path / "a")
    loaded = keepset.Cache.load(tmp_path / "a", model)
    ids = torch.cat([ids, prompt(1, 9, 1)], 1)
    for past in (cache, loaded):
        generate(model, ids, past, max_new_tokens=4)
        past.compact()
    assert same_keep_set(cache.keep_set, loaded.keep_set) and loaded.events[-1].entries == 2 * 2 * (20 + 13)


@pytest.mark.parametrize("recipe", ["quantized(snapkv(window=8), keep=0.5, turns=True)"])
def test_quantised_entries_are_left_out(recipe: str) -> None:
    for bits in (8, 4):
        cache = keepset.Cache(tiny("llama"), recipe.replace("8), ", f"8), bits={bits}, "))
        follow(cache, SAID[:3], left_out={2: [(5, 70)]})
        kept = positions(cache)
        assert all(head[-20:] == list(range(head[-1] - 19, head[-1] + 1)) for heads in kept.values() for head in heads)
        assert not any(5 <= position < 70 for heads in kept.values() for head in heads for position in head)


def test_refusals() -> None:
    model, ids = tiny("llama"), prompt(1, 20)
    cache = keepset.Cache(model, "snapkv(window=8, keep=9)")
    with refusal("add turns=True"):
        cache.compact()
    cache = keepset.Cache(model, "snapkv(window=8, keep=9, turns=True)")
    with refusal("whole prompt"):
        cache.compact()
    generate(model, ids, cache, max_new_tokens=2)
    with refusal("the next turn goes on from 1 to 21 tokens"):
        cache.compact(tokens=22)
    with refusal("is no span of tokens"):
        cache.leave_out([(3, 22)])
    with refusal("Assisted generation"):
        cache.activate_past_recording()
    cache.compact()
    with refusal("after the newest compression"):
        cache.crop(20)
    mixed = keepset.Cache(tiny("gemma3"), "snapkv(window=8, keep=9, turns=True)")
    generate(tiny("gemma3"), prompt(1, 60), mixed, max_new_tokens=2)
    before = positions(mixed)
    with refusal("cannot take back 60 tokens"):
        mixed.compact(tokens=1)
    assert positions(mixed) == before and not mixed.events
    mixed.compact()
    with refusal("have read all tokens"):
        mixed.leave_out([(3, 5)])
    padded, mask = padded_prompt([0, 4], 20)
    cache = keepset.Cache(model, "snapkv(window=8, keep=0.5, turns=True)")
    generate(model, padded, cache, mask, max_new_tokens=2)
    with refusal("different lengths"):
        cache.compact()
