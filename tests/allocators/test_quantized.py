"""`quantized` stores the same entries in fewer bytes, and attention reads the rounded ones."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import keepset
from keepset.allocators.post_processors import FEW_BYTES
from keepset.errors import KeepsetError, RecipeError
from keepset.hf.batch import go_together
from keepset.kernels.entry_format import FORMATS
from keepset.recipe import in_full, in_short
from tests.hf.models import Oracle, check_copies, generate, left_padded, oracle_gap, prompt, same_keep_set, tiny
from tests.kernels.few_bits import in_steps, matrix
from tests.methods.naive import Shape, observe

RECIPES = ["quantized({}(window=5), keep=12)", "quantized(match(adakv({}(window=5))), keep=12)"]


def test_int8_is_another_spelling() -> None:
    recipe = keepset.Recipe.parse("int8(match(knorm), keep=12)")
    assert recipe == keepset.Recipe.parse("quantized(match(knorm), bits=8, keep=12)")
    assert str(recipe) == "quantized(match(knorm), bits=8, keep=12)"
    written = in_full("quantized(match(knorm), keep=12)").replace("quantized(", "int8(").replace(", bits=8", "")
    assert in_short(written) == "quantized(match(knorm), keep=12)"
    for text, said in (
        ("quantized(knorm, bits=7)", "none of its choices"),
        ("int8(knorm, bits=4)", "int8 has no parameter 'bits'"),
    ):
        with pytest.raises(RecipeError, match=said):
            keepset.Recipe.parse(text)


def test_the_budget_says_how_many_bits() -> None:
    parse = keepset.Recipe.parse
    few, many = f"bytes={FEW_BYTES * 0.99}", f"bytes={FEW_BYTES}"
    for text, bits, written in (
        (f"quantized(knorm, {few})", 4, f"quantized(knorm, {few})"),
        (f"quantized(knorm, {many})", 8, f"quantized(knorm, {many})"),
        ("quantized(knorm, keep=0.01)", 8, "quantized(knorm, keep=0.01)"),
        (f"quantized(knorm, bits=8, {few})", 8, f"quantized(knorm, bits=8, {few})"),
        (f"int8(knorm, {few})", 8, f"quantized(knorm, bits=8, {few})"),
        (f"quantized(knorm, bits=4, {many})", 4, f"quantized(knorm, bits=4, {many})"),
        (f"quantized(knorm, bits=4, {few})", 4, f"quantized(knorm, bits=4, {few})"),
        ("quantized(gvote)", 8, "quantized(gvote)"),
        ("quantized(knorm)", None, "quantized(knorm)"),
        ("int8(knorm)", 8, "quantized(knorm, bits=8)"),
    ):
        recipe = parse(text)
        assert recipe.method.bits == bits and str(recipe) == written and parse(written) == recipe, text
        if bits is not None:  # a file says it, whatever the rule will be
            assert f"bits={bits}" in in_full(text) and parse(in_short(in_full(text))) == recipe


def test_another_budget_says_it_anew() -> None:
    low, high = keepset.Recipe.parse("quantized(knorm)").with_budget(bytes=0.01), 0.5
    assert low.method.bits == 4
    assert low.with_budget(bytes=high).method.bits == low.with_budget(keep=12).method.bits == 8
    assert str(low.with_budget()) == "quantized(knorm)" and low.with_budget(bytes=high).with_budget(bytes=0.01) == low
    eight_bits = keepset.Recipe.parse("quantized(knorm, bits=8)").with_budget(bytes=0.01)
    assert eight_bits.method.bits == 8 and str(eight_bits.with_budget()) == "quantized(knorm, bits=8)"
    assert low.budget_of_sizes([(64, 64)]).keep > 1.7 * eight_bits.budget_of_sizes([(64, 64)]).keep


def test_an_odd_size_of_heads_is_refused_in_4_bits() -> None:
    observation = observe(Shape((9,), 2, 1, 7, 7))
    with pytest.raises(KeepsetError, match="have 7 and 7 numbers: use bits=8"):
        keepset.Recipe.parse("quantized(knorm, bits=4, keep=2)").select(observation)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("text", RECIPES)
def test_the_same_entries_in_fewer_bytes(text: str, bits: int) -> None:
    """An entry of a head of 16 numbers takes 32 or 16 bytes, two scales and a position, and with `match` a bias."""
    ids, mask = left_padded(prompt(2, 40), [0, 7])
    cache = keepset.Cache(tiny("llama"), in_bits(text.format("snapkv"), bits))
    whole = keepset.Cache(tiny("llama"), inside(text.format("snapkv")))
    for past in (cache, whole):
        with torch.no_grad():
            tiny("llama")(ids, attention_mask=mask, past_key_values=past)
    assert cache.keep_set is not None and whole.keep_set is not None
    assert same_keep_set(cache.keep_set, whole.keep_set) and cache.nbytes_full == whole.nbytes_full
    assert cache.keep_set.nbytes == cache.keep_set.entries * (4 * bits + 8)
    assert cache.nbytes == cache.keep_set.entries * (4 * bits + 12 + 4 * ("match" in text))
    for layer in cache.managed_layers:
        columns, unquantised = (past.managed_layers[layer].store.padded()[0] for past in (cache, whole))
        for name in ("keys", "values"):
            error = (columns[name] - unquantised[name]).abs()
            if bits == 8:
                mixed = (unquantised[name].double() @ matrix(16).T).flatten(0, 2)
                right = (torch.stack([in_steps(row) for row in mixed]) @ matrix(16)).view(unquantised[name].shape)
                torch.testing.assert_close(columns[name].double(), right, rtol=1e-5, atol=1e-6)
            elif name == "keys" or "match" not in text:  # which fits other values to keys of 4 bits
                assert (error.norm(dim=-1) <= 0.2 * unquantised[name].norm(dim=-1)).all()
            assert columns[name].dtype == torch.float32


def inside(text: str) -> str:
    return text.removeprefix("quantized(").replace("), keep", ", keep")


def in_bits(text: str, bits: int) -> str:
    return text.replace(", keep", f", bits={bits}, keep")


@pytest.mark.parametrize("bits", [8, 4, None])
@pytest.mark.parametrize("text", [pytest.param(RECIPES[0], marks=pytest.mark.full), RECIPES[1]])
def test_saved_forked_cropped_and_reordered(tmp_path: Path, text: str, bits: int | None) -> None:
    """And with what is inside alone: the biases of `match`."""
    text = text.format("snapkv")
    cache = keepset.Cache(tiny("llama"), in_bits(text, bits) if bits else inside(text))
    with torch.no_grad():
        tiny("llama")(prompt(2, 40), past_key_values=cache, use_cache=True)
        tiny("llama")(prompt(2, 3), past_key_values=cache, use_cache=True)  # 4 bits have a residual of these
    assert "match" not in text or all(layer.store.heads.bias.any() for layer in cache.managed_layers.values())
    check_copies(tiny("llama"), cache, tmp_path / "context.safetensors")


@pytest.mark.parametrize("bits", [8, 4])
def test_the_oracle_agrees_on_fed_tokens_with_padding(bits: int) -> None:
    ids, mask = left_padded(prompt(2, 44), [0, 7])
    mask[1, 41] = 0  # also between the prompt and what follows
    cache = keepset.Cache(tiny("qwen3"), f"quantized(match(pool(prompt_queries)), bits={bits}, keep=12)")
    with torch.no_grad():
        for part in (slice(0, 40), slice(40, 44)):
            logits = tiny("qwen3")(
                ids[:, part],
                attention_mask=mask[:, : part.stop],
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, part],
                past_key_values=cache,
            ).logits
    reference = Oracle(cache, mask).logits(tiny("qwen3"), ids)[:, 40:]
    torch.testing.assert_close(logits[mask[:, 40:].bool()], reference[mask[:, 40:].bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("inner", [pytest.param("snapkv(window=4)", marks=pytest.mark.full), "adakv(tova)"])
def test_entries_do_not_drift_from_event_to_event(inner: str, bits: int) -> None:
    """Each event reads entries, chooses among them and moves them as they are stored; 4 bits lose a residual."""
    ids, stores = prompt(1, 40), []
    cache = keepset.Cache(tiny("llama"), f"quantized({inner}, bits={bits}, keep=16, every=8)")
    output = generate(tiny("llama"), ids, cache, max_new_tokens=7)
    for _ in range(3):
        store = cache.managed_layers[1].store
        assert store is not None
        stores.append(store.fork().padded())
        newest = output.sequences[:, -1:]
        sequences = torch.cat([output.sequences, newest.expand(-1, 1)], 1)
        output = generate(tiny("llama"), sequences, cache, max_new_tokens=8)
    assert len(cache.events) >= 3
    # The first event finds them whole.
    assert [event.nbytes_before // event.entries for event in cache.events] == [128] + [4 * bits + 8] * (
        len(cache.events) - 1
    )
    (first, first_exists), (last, last_exists) = stores[0], stores[-1]
    shared = 0
    for head in range(2):
        of_last = {int(at): i for i, at in enumerate(last["positions"][0, head]) if last_exists[0, head, i]}
        for i, at in enumerate(first["positions"][0, head].tolist()):
            if first_exists[0, head, i] and at in of_last:
                shared += 1
                for name in ("keys", "values"):
                    before, after = first[name][0, head, i], last[name][0, head, of_last[at]]
                    if bits == 8 or at < 40:  # the prompt, which the first event has rounded
                        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
                    else:
                        assert (after - before).norm() <= 0.2 * before.norm()
    assert shared > 5


@pytest.mark.parametrize("kernels", ["pytorch", pytest.param("triton", marks=pytest.mark.full)])
def test_side_by_side_with_whole_entries(kernels: str, request: pytest.FixtureRequest) -> None:
    if kernels == "triton":
        request.getfixturevalue("triton_interpreted")
    model, texts = tiny("llama"), ["snapkv(window=5, keep=9)", "quantized(adakv(snapkv(window=5)), keep=12)"]
    texts += ["snapkv(window=5, keep=10)", "quantized(adakv(snapkv(window=5)), bits=4, keep=12)"]
    caches = [keepset.Cache(model, text) for text in texts]
    with torch.no_grad():
        for row, cache in enumerate(caches):
            model(prompt(1, 30 + row, row), past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens = prompt(4, 1, 9)
        alone = [
            model(token[None], past_key_values=cache.fork(), use_cache=True).logits[0, -1]
            for token, cache in zip(tokens, caches, strict=True)
        ]
        together, errors = go_together(model, caches, tokens)
    assert not errors
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_bfloat16_model(bits: int) -> None:
    model, (ids, mask) = copy.deepcopy(tiny("llama")).bfloat16(), left_padded(prompt(2, 40), [0, 7])
    cache = keepset.Cache(model, f"quantized(match(snapkv(window=5)), bits={bits}, keep=12)")
    output = generate(model, ids, cache, mask, max_new_tokens=3)
    store = cache.managed_layers[0].store
    assert store is not None and store.heads.format is FORMATS[bits] and store.heads.dtype == torch.bfloat16
    assert cache.keep_set is not None and cache.keep_set.nbytes == cache.keep_set.entries * (4 * bits + 4)
    assert oracle_gap(model, cache, output, mask) < 0.3


@torch.no_grad()
def test_an_event_that_one_call_reaches_after_the_prompts_finds_entries_in_few_bits() -> None:
    """The first layer comes to the later event before the last one has come to the prompt's."""
    cache = keepset.Cache(tiny("llama"), "quantized(snapkv(window=2), bits=8, keep=4, every=3)", prompt_length=2)
    for part in prompt(1, 6).split([1, 5], 1):
        tiny("llama")(part, past_key_values=cache, use_cache=True)
    assert [(event.length, event.nbytes_before // event.entries) for event in cache.events] == [(2, 128), (5, 40)]
