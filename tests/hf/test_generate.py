"""Every way to generate that transformers offers, on a cache that compresses."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import keepset
from tests.hf.models import (
    LAYOUTS,
    Oracle,
    extended,
    feed,
    full,
    generate,
    hooks_on,
    left_padded,
    oracle_gap,
    padded_prompt,
    prompt,
    same_keep_set,
    tiny,
)

LENGTH = 40
ADAKV = LAYOUTS["head-ragged"].format(keep=12)
SNAPKV = LAYOUTS["dense"].format(keep=12)
PYRAMID = LAYOUTS["layer-ragged"].format(keep=12)
by_recipe = pytest.mark.parametrize("recipe", [SNAPKV, PYRAMID, ADAKV], ids=list(LAYOUTS))
padded_or_not = pytest.mark.parametrize("padding", [[0, 0], [0, 7]], ids=["whole", "padded"])


# --- sampling and beams


def test_sampling_draws_the_same_tokens_when_all_is_kept() -> None:
    model = tiny("llama")
    ids, mask = padded_prompt([0, 7], LENGTH)
    options: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_k=50, max_new_tokens=8)
    torch.manual_seed(3)
    expected = full(model, ids, mask, **options)
    for recipe in (LAYOUTS[layout].format(keep=1.0) for layout in LAYOUTS):
        torch.manual_seed(3)
        drawn = generate(model, ids, keepset.Cache(model, recipe), mask, **options)
        assert torch.equal(drawn.sequences, expected.sequences)


@by_recipe
def test_samples_of_one_prompt_agree_with_the_oracle(recipe: str) -> None:
    model = tiny("llama")
    ids, mask = padded_prompt([0, 7], LENGTH)
    past = keepset.Cache(model, recipe)
    output = generate(model, ids, past, mask, do_sample=True, num_return_sequences=2, max_new_tokens=6)
    assert oracle_gap(model, past, output, mask.repeat_interleave(2, 0)) < 5e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beams_equal_those_of_the_full_cache_when_all_is_kept(layout: str) -> None:
    model = tiny("llama")
    ids, mask = padded_prompt([0, 7], LENGTH)
    expected = full(model, ids, mask, num_beams=3, max_new_tokens=8)
    past = keepset.Cache(model, LAYOUTS[layout].format(keep=1.0))
    output = generate(model, ids, past, mask, num_beams=3, max_new_tokens=8)
    assert torch.equal(output.sequences, expected.sequences)


@pytest.mark.cross
@by_recipe
@padded_or_not
def test_scores_of_beams_are_the_oracles(recipe: str, padding: list[int]) -> None:
    model = tiny("llama")
    ids, mask = padded_prompt(padding, LENGTH)
    past = keepset.Cache(model, recipe)
    beams: dict[str, Any] = dict(num_beams=3, num_return_sequences=3, length_penalty=0.0, output_scores=True)
    output = generate(model, ids, past, mask, max_new_tokens=8, **beams)
    masks = extended(mask.repeat_interleave(3, 0), output.sequences.shape[1])
    logits = Oracle(past, masks).logits(model, output.sequences)[:, LENGTH - 1 : -1]
    tokens = output.sequences[:, LENGTH:, None]
    expected = logits.log_softmax(-1).gather(-1, tokens).sum((1, 2))
    assert torch.allclose(output.sequences_scores, expected, atol=1e-4)
    assert len({tuple(row) for row in output.sequences.tolist()}) == 6


# --- several turns


@pytest.mark.cross
@by_recipe
@padded_or_not
@pytest.mark.parametrize("later", [[0, 0], [2, 0]], ids=["whole turn", "padded turn"])
def test_a_conversation_goes_on(recipe: str, padding: list[int], later: list[int]) -> None:
    model = tiny("llama")
    ids, mask = padded_prompt(padding, LENGTH)
    past = keepset.Cache(model, recipe)
    for seed, tokens in ((1, 9), (2, 1), (3, 5)):
        output = generate(model, ids, past, mask, max_new_tokens=6)
        turn, turn_mask = left_padded(prompt(2, tokens, seed), later if tokens > 2 else [0, 0])
        ids = torch.cat([output.sequences, turn], 1)
        mask = torch.cat([extended(mask, output.sequences.shape[1]), turn_mask], 1)
    output = generate(model, ids, past, mask, max_new_tokens=6)
    assert oracle_gap(model, past, output, mask) < 5e-5
    assert len(past.events) == 1 and past.events[0].length == LENGTH


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversation_that_keeps_all_is_the_models_own(layout: str) -> None:
    model = tiny("qwen3")
    first, mask = padded_prompt([0, 7], LENGTH)
    turn, turn_mask = padded_prompt([2, 0], 9, 1)
    sequences = []
    for keep_all in (False, True):
        model.set_attn_implementation("sdpa")
        past = keepset.Cache(model, LAYOUTS[layout].format(keep=1.0)) if keep_all else DynamicCache(config=model.config)
        said = generate(model, first, past, mask, max_new_tokens=5).sequences
        ids = torch.cat([said, turn], 1)
        masks = torch.cat([extended(mask, said.shape[1]), turn_mask], 1)
        sequences.append(generate(model, ids, past, masks, max_new_tokens=5).sequences)
    assert torch.equal(*sequences)


@pytest.mark.cross
@by_recipe
@padded_or_not
@pytest.mark.parametrize("holes", [[0, 0], [2, 0]], ids=["whole turn", "padded turn"])
@pytest.mark.parametrize("removed", [1, 3, 4, 6])
@torch.no_grad()
def test_rows_move_and_tokens_are_taken_back(recipe: str, padding: list[int], holes: list[int], removed: int) -> None:
    model = tiny("llama")
    past = keepset.Cache(model, recipe)
    ids = torch.empty(2, 0, dtype=torch.long)
    mask = torch.empty(2, 0, dtype=torch.long)

    def follow(turn: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal ids, mask
        ids, mask = torch.cat([ids, turn[0]], 1), torch.cat([mask, turn[1]], 1)
        return feed(model, past, turn[0], mask)

    follow(padded_prompt(padding, LENGTH))
    follow(padded_prompt(holes, 5, 1))
    past.reorder_cache(torch.tensor([1, 0, 1]))
    ids, mask, requests = ids[[1, 0, 1]], mask[[1, 0, 1]], [1, 0, 1]
    follow(padded_prompt([*holes, 0], 3, 2))
    past.crop(-removed)
    ids, mask = ids[:, :-removed], mask[:, :-removed]
    assert past.get_seq_length() == ids.shape[1]
    logits = follow(padded_prompt([0, *holes], 4, 3))
    expected = Oracle(past, mask, requests).logits(model, ids)[:, -4:]
    real = mask[:, -4:].bool()
    assert (logits - expected)[real].abs().max() < 5e-5


def test_two_caches_of_one_model_take_turns() -> None:
    model = tiny("llama")
    recipes = ["expected_attention(future=16, keep=12)", ADAKV]
    prompts = [prompt(1, 30, seed) for seed in (1, 2)]

    def turns(order: list[int]) -> list[Tensor]:
        caches = [keepset.Cache(model, recipe) for recipe in recipes]
        ids = list(prompts)
        for which in order:
            said = generate(model, ids[which], caches[which], max_new_tokens=4).sequences
            ids[which] = torch.cat([said, prompt(1, 3, 7)], 1)
        return ids

    for alternating, one_by_one in zip(turns([0, 1, 1, 0, 1, 0]), turns([0, 0, 0, 1, 1, 1]), strict=True):
        assert torch.equal(alternating, one_by_one)


@pytest.mark.parametrize("recipe", [ADAKV, "h2o(keep=12)", "expected_attention(future=16, keep=12)"])
def test_reset_makes_a_cache_new(recipe: str) -> None:
    model = tiny("llama")
    past = keepset.Cache(model, recipe)
    runs = []
    for ids, mask in (padded_prompt([0, 7], LENGTH), padded_prompt([3], LENGTH, seed=1), padded_prompt([0, 7], LENGTH)):
        past.reset()
        assert past.keep_set is None and past.nbytes == 0 and past.get_seq_length() == 0
        runs.append((generate(model, ids, past, mask, max_new_tokens=5).sequences, past.keep_set))
    assert torch.equal(runs[0][0], runs[2][0]) and same_keep_set(runs[0][1], runs[2][1])


@by_recipe
def test_copies_go_their_own_ways(recipe: str) -> None:
    model = tiny("llama")
    ids, mask = padded_prompt([0, 7], LENGTH)
    past = keepset.Cache(model, recipe)
    said = generate(model, ids, past, mask, max_new_tokens=3).sequences
    mask = extended(mask, said.shape[1] + 8)
    twins = [past.fork(), copy.deepcopy(past), past]
    held = past.nbytes
    for twin, seed in zip(twins, (1, 2, 3), strict=True):
        assert past.get_seq_length() == LENGTH + 2 and past.nbytes == held
        turn = torch.cat([said, prompt(2, 8, seed)], 1)
        output = generate(model, turn, twin, mask, max_new_tokens=4)
        assert oracle_gap(model, twin, output, mask) < 5e-5


@pytest.mark.parametrize("text", ["knorm(keep=9)", "adakv(snapkv(window=4), keep=9, every=6)"])
@torch.no_grad()
def test_trim_gives_back_what_is_held_for_tokens_to_come(text: str) -> None:
    model, logits = tiny("llama"), []
    for trims in (False, True):
        past = keepset.Cache(model, text)
        for start, end in ((0, 20), (20, 21), (21, 24)):
            made = model(prompt(1, 24)[:, start:end], past_key_values=past).logits
            if trims and end == 21:
                held = past.nbytes
                past.trim()
                stores = [layer.store for layer in past.kept_layers.values()]
                assert all(store.nbytes == store.entries * store.entry_bytes for store in stores)
                assert past.nbytes < held
        logits.append(made)
    assert torch.equal(*logits)


def test_a_copy_still_sees_hidden_states() -> None:
    model = tiny("llama")
    recipe = "expected_attention(future=16, keep=12)"
    ids, mask = padded_prompt([0, 7], LENGTH)
    expected = generate(model, ids, keepset.Cache(model, recipe), mask, max_new_tokens=4).sequences
    for twin in (keepset.Cache(model, recipe).fork(), copy.deepcopy(keepset.Cache(model, recipe))):
        assert torch.equal(generate(model, ids, twin, mask, max_new_tokens=4).sequences, expected)


# --- assisted generation


@cache
def assistant(noise: float) -> Any:
    """The model itself, or one that is right now and then, or one that never is."""
    model = AutoModelForCausalLM.from_config(tiny("llama").config, attn_implementation="sdpa").eval()
    model.load_state_dict(tiny("llama").state_dict())
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return model


@pytest.mark.full
@pytest.mark.cross
@pytest.mark.parametrize("noise", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("recipe", [SNAPKV, PYRAMID, ADAKV, "expected_attention(future=16, keep=12)", "h2o(keep=12)"])
def test_an_assistant_changes_nothing(recipe: str, noise: float) -> None:
    check_assisted(recipe, prompt(1, LENGTH, 3), assistant_model=assistant(noise))


@by_recipe
def test_prompt_lookup_changes_nothing(recipe: str) -> None:
    repeating = prompt(1, 8, 3).repeat(1, 5)
    check_assisted(recipe, repeating, prompt_lookup_num_tokens=4)


def check_assisted(recipe: str, ids: Tensor, **options: Any) -> None:
    model = tiny("llama")
    alone = keepset.Cache(model, recipe)
    expected = generate(model, ids, alone, max_new_tokens=20)
    assisted = keepset.Cache(model, recipe, prompt_length=ids.shape[1])
    output = generate(model, ids, assisted, max_new_tokens=20, **options)
    assert same_keep_set(assisted.keep_set, alone.keep_set)
    assert torch.equal(output.sequences, expected.sequences)
    assert oracle_gap(model, assisted, output, torch.ones_like(ids)) < 5e-5
    kept = alone.keep_set.counts[0, 0, 0].item()
    assert assisted.layers[0].store.counts[0] - kept == assisted.get_seq_length() - ids.shape[1]


@by_recipe
def test_an_assistant_joins_in_the_second_turn(recipe: str) -> None:
    model = tiny("llama")
    ids = prompt(1, LENGTH)
    turn = prompt(1, 8, 1).repeat(1, 2)
    answers = []
    for drafting in ({}, dict(prompt_lookup_num_tokens=4)):
        past = keepset.Cache(model, recipe)
        said = generate(model, ids, past, max_new_tokens=4).sequences
        mask = torch.ones(1, said.shape[1] + turn.shape[1])
        new = torch.cat([said[:, -1:], turn], 1)
        answers.append(generate(model, new, past, mask, max_new_tokens=8, **drafting).sequences)
    assert torch.equal(*answers)


@pytest.mark.cross
@pytest.mark.parametrize("recipe", [ADAKV, "h2o(keep=12)", "expected_attention(future=16, keep=12)"])
@padded_or_not
@torch.no_grad()
def test_drafts_that_follow_the_last_chunk(recipe: str, padding: list[int]) -> None:
    model = tiny("llama")
    ids, mask = padded_prompt(padding, LENGTH)
    whole = keepset.Cache(model, recipe)
    generate(model, ids, whole, mask, max_new_tokens=1)
    drafts = torch.cat([ids, prompt(2, 5, 1)], 1)
    mask = extended(mask, LENGTH + 5)
    past = keepset.Cache(model, recipe, prompt_length=LENGTH)
    for part in (slice(0, 25), slice(25, LENGTH + 5)):
        logits = feed(model, past, drafts[:, part], mask[:, : part.stop])
    assert same_keep_set(past.keep_set, whole.keep_set)
    assert (logits[:, -5:] - Oracle(past, mask).logits(model, drafts)[:, -5:]).abs().max() < 5e-5
    past.crop(-4)
    drafts, mask = drafts[:, :-4], mask[:, :-4]
    output = generate(model, torch.cat([drafts, drafts[:, -1:]], 1), past, extended(mask, LENGTH + 2), max_new_tokens=4)
    assert oracle_gap(model, past, output, extended(mask, LENGTH + 2)) < 5e-5


def test_drafts_of_a_hybrid_model_are_taken_back() -> None:
    model = tiny("gemma3")
    ids = prompt(1, 8, 3).repeat(1, 5)
    expected = generate(model, ids, keepset.Cache(model, ADAKV), max_new_tokens=20)
    past = keepset.Cache(model, ADAKV, prompt_length=LENGTH)
    assert torch.equal(
        generate(model, ids, past, max_new_tokens=20, prompt_lookup_num_tokens=4).sequences, expected.sequences
    )


# --- chunked prefill


@pytest.mark.cross
@pytest.mark.parametrize("chunk", [7, 16, 39])
@pytest.mark.parametrize("padding", [[0, 0], [0, 7], [3, 18]], ids=str)
@pytest.mark.parametrize(
    "recipe",
    [
        SNAPKV,
        ADAKV,
        "h2o(keep=12)",
        "expected_attention(future=16, keep=12)",
        "tova(keep=12)",
        "streaming_llm(keep=12)",
    ],
)
def test_chunks_change_nothing(recipe: str, padding: list[int], chunk: int) -> None:
    model = tiny("qwen3")
    ids, mask = padded_prompt(padding, LENGTH)
    whole = keepset.Cache(model, recipe)
    expected = generate(model, ids, whole, mask, max_new_tokens=5)
    chunked = keepset.Cache(model, recipe, prompt_length=LENGTH)
    output = generate(model, ids, chunked, mask, max_new_tokens=5, prefill_chunk_size=chunk)
    assert same_keep_set(chunked.keep_set, whole.keep_set)
    assert torch.equal(output.sequences, expected.sequences)
    assert oracle_gap(model, chunked, output, mask) < 5e-5


# --- small and odd calls


@by_recipe
def test_rows_that_stop_early(recipe: str) -> None:
    model = tiny("llama")
    ids, mask = padded_prompt([0, 7], LENGTH)
    said = generate(model, ids, keepset.Cache(model, recipe), mask, max_new_tokens=10).sequences[:, LENGTH:]
    end = next(int(token) for token in said[0, 2:] if token not in said[1])
    stopping: dict[str, Any] = dict(eos_token_id=end, max_new_tokens=10)
    together = generate(model, ids, keepset.Cache(model, recipe), mask, **stopping).sequences
    assert together.shape[1] == LENGTH + 10 and together[0, -1] == 0
    for row, pad in enumerate([0, 7]):
        single = ids[row : row + 1, pad:]
        alone = generate(model, single, keepset.Cache(model, recipe), **stopping).sequences[0]
        assert torch.equal(together[row, pad : pad + len(alone)], alone)


@pytest.mark.cross
@by_recipe
@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_of_a_few_tokens(recipe: str, length: int) -> None:
    model = tiny("llama")
    ids = prompt(1, length)
    output = generate(model, ids, keepset.Cache(model, recipe), max_new_tokens=6)
    assert torch.equal(output.sequences, full(model, ids, max_new_tokens=6).sequences)


@pytest.mark.parametrize("recipe", ["h2o(keep=12)", "expected_attention(future=16, keep=12)", "tova(keep=12)"])
def test_a_prompt_of_one_token(recipe: str) -> None:
    model = tiny("llama")
    ids, mask = padded_prompt([3, 0], 4)
    output = generate(model, ids, keepset.Cache(model, recipe), mask, max_new_tokens=6)
    assert torch.equal(output.sequences, full(model, ids, mask, max_new_tokens=6).sequences)


@by_recipe
def test_one_new_token(recipe: str) -> None:
    model = tiny("llama")
    ids = prompt(1, LENGTH)
    past = keepset.Cache(model, recipe)
    output = generate(model, ids, past, max_new_tokens=1)
    assert torch.equal(output.sequences, full(model, ids, max_new_tokens=1).sequences)
    assert past.get_seq_length() == LENGTH and past.keep_set.counts.sum() == 12 * 2 * len(past)


def test_two_models_in_two_threads() -> None:
    jobs = [("llama", SNAPKV), ("qwen3", "expected_attention(future=16, keep=12)")]

    def run(job: tuple[str, str]) -> list[Tensor]:
        model = tiny(job[0])
        ids, mask = padded_prompt([0, 7], LENGTH)
        return [generate(model, ids, keepset.Cache(model, job[1]), mask, max_new_tokens=8).sequences for _ in range(4)]

    expected = [run(job)[0] for job in jobs]
    with ThreadPoolExecutor(2) as pool:
        for sequences, alone in zip(pool.map(run, jobs), expected, strict=True):
            assert all(torch.equal(sequence, alone) for sequence in sequences)


# --- what keepset leaves alone


@padded_or_not
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_other_caches_behave_as_under_sdpa(architecture: str, padding: list[int]) -> None:
    model = tiny(architecture)
    ids, mask = padded_prompt(padding, LENGTH)
    expected = full(model, ids, mask, max_new_tokens=6).sequences
    keepset.Cache(model, "expected_attention(keep=12)")
    assert model.config._attn_implementation == "keepset"
    assert torch.equal(generate(model, ids, None, mask, max_new_tokens=6).sequences, expected)
    for other in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=LENGTH + 8)):
        assert torch.equal(generate(model, ids, other, mask, max_new_tokens=6).sequences, expected)
    static = generate(model, ids, None, mask, max_new_tokens=6, cache_implementation="static")
    assert torch.equal(static.sequences, expected)


def test_forward_without_a_cache_and_training_are_untouched() -> None:
    model = copy.deepcopy(tiny("llama"))
    ids, mask = padded_prompt([0, 7], LENGTH)
    results = []
    for implementation in ("sdpa", "keepset"):
        if implementation == "keepset":
            keepset.Cache(model, ADAKV)
        else:
            model.set_attn_implementation(implementation)
        model.train()
        output = model(ids, attention_mask=mask, labels=ids, use_cache=False)
        output.loss.backward()
        results.append((output.logits.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()))
        model.zero_grad()
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", [ADAKV, "h2o(keep=12)"])
def test_gradients_pass_through_a_compressed_cache(recipe: str) -> None:
    model = copy.deepcopy(tiny("llama"))
    past = keepset.Cache(model, recipe)
    model(prompt(2, LENGTH), past_key_values=past)
    model(prompt(2, 3), past_key_values=past).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_hooks_go_with_the_prompt_or_with_the_cache() -> None:
    model = copy.deepcopy(tiny("llama"))

    before = hooks_on(model)
    past = keepset.Cache(model, "expected_attention(future=16, keep=12)")
    assert hooks_on(model) > before
    generate(model, prompt(1, LENGTH), past, max_new_tokens=2)
    assert hooks_on(model) == before
    past = keepset.Cache(model, "expected_attention(future=16, keep=12)")
    del past
    gc.collect()
    assert hooks_on(model) == before


@pytest.mark.parametrize(
    "recipe",
    [ADAKV, "expected_attention(future=16, keep=12)", "received(keep=12)", "snapkv(window=4, keep=12, every=4)"],
)
@torch.no_grad()
def test_a_cache_that_nobody_holds_is_gone_at_once(recipe: str) -> None:
    model, past = tiny("llama"), keepset.Cache(tiny("llama"), recipe)
    gc.disable()
    try:
        for tokens in (LENGTH, 1):
            model(prompt(1, tokens), past_key_values=past)
        references = [weakref.ref(past), weakref.ref(past.fork()), weakref.ref(past.layers[0])]
        del past
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()
