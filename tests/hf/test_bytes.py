"""Budgets in bytes against bytes that are really allocated: never more than the share, and no entry less than fits."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import keepset
from keepset.hf.store import EntryStore
from tests.hf.models import feed, padded_prompt, prompt, recipe, statistics, tiny

HALF = [torch.bfloat16, torch.float16]
ENTRY = {
    "snapkv(window=2)": lambda k, v: 2 * k + 2 * v + 4,
    "adakv(snapkv(window=2))": lambda k, v: 2 * k + 2 * v + 4,
    "quantized(snapkv(window=2))": lambda k, v: k + v + 2 + 2 + 4,
    "quantized(adakv(snapkv(window=2)), bits=4)": lambda k, v: k / 2 + v / 2 + 2 + 2 + 4,
    "match(snapkv(window=2))": lambda k, v: 2 * k + 2 * v + 4 + 4,
    "quantized(match(snapkv(window=2)))": lambda k, v: k + v + 2 + 2 + 4 + 4,
    "quantized(match(pool(distilled(stats='FILE'))))": lambda k, v: k + v + 2 + 2 + 4 + 4 + 4,
    "adakv(distilled(stats='FILE'))": lambda k, v: 2 * k + 2 * v + 4 + 4,
}
"""Bytes of an entry on a model of 16 bits: key and value, scales, position, bias, what `distilled` remembers."""


@cache
def model_of(architecture: str, dtype: torch.dtype) -> Any:
    model = tiny(architecture)
    copy = AutoModelForCausalLM.from_config(model.config, dtype=dtype).eval()
    copy.load_state_dict(model.state_dict())
    copy.config.name_or_path = model.config.name_or_path
    return copy


def compressed(text: str, share: float, architecture: str, length: int, dtype: torch.dtype) -> keepset.Cache:
    named = text.replace("FILE", str(statistics(architecture))) if "FILE" in text else text
    model = model_of(architecture, dtype)
    cache = keepset.Cache(model, keepset.Recipe.parse(named).with_budget(bytes=share))
    with torch.no_grad():
        model(prompt(1, length), past_key_values=cache, logits_to_keep=1)
    return cache


def stores_of(cache: keepset.Cache, text: str) -> list[tuple[EntryStore, int, int]]:
    """Every layer's store, the bytes of its entries, and those of an entry in a full 16-bit cache."""
    found = []
    for layer in cache.managed_layers.values():
        store = layer.store
        assert store is not None
        sizes = store.heads.sizes
        allocated = sum(column.nbytes for column in store.columns.tensors.values())
        assert allocated == store.entries * ENTRY[text](*sizes)
        found.append((store, allocated, 2 * sum(sizes)))
    return found


def always_of(recipe: keepset.Recipe, length: int) -> int:
    return max(1, min(recipe.budget.sinks + recipe.budget.recent, length))


ONE_BY_ONE, TOGETHER = [text for text in ENTRY if "pool" not in text], [text for text in ENTRY if "pool" in text]


@pytest.mark.cross
@pytest.mark.parametrize("text", ONE_BY_ONE)
@pytest.mark.parametrize("share", [0.25, 0.1, 1.0])
@pytest.mark.parametrize("length", [40, 1, 3, 97])
@pytest.mark.parametrize("architecture", ["llama", "llama_odd_head", "llama_mqa", "gemma4"])
@pytest.mark.parametrize("dtype", HALF)
def test_every_layer_takes_its_share_and_no_more(
    text: str, share: float, length: int, architecture: str, dtype: torch.dtype
) -> None:
    """Heads of gemma4 are of another size than the model says."""
    cache = compressed(text, share, architecture, length, dtype)
    always = always_of(cache.recipe, length)
    for store, allocated, full in stores_of(cache, text):
        allowed = Fraction(str(share)) * store.kv_heads * length * full
        per_head, left_over = divmod(store.entries, store.kv_heads)
        assert not left_over and always <= per_head <= length
        assert per_head == always or allocated <= allowed
        assert per_head == length or allocated + store.kv_heads * allocated / store.entries > allowed


@pytest.mark.parametrize("text", TOGETHER)
@pytest.mark.parametrize(("share", "length"), [(0.25, 97), (0.1, 40), (1.0, 40), (0.25, 1), (0.5, 3)])
def test_layers_that_share_a_budget_take_their_share_together(text: str, share: float, length: int) -> None:
    cache = compressed(text, share, "llama", length, torch.bfloat16)
    stores, always = stores_of(cache, text), always_of(cache.recipe, length)
    entries, allocated = sum(store.entries for store, *_ in stores), sum(nbytes for _, nbytes, _ in stores)
    heads = sum(store.kv_heads for store, *_ in stores)
    allowed = Fraction(str(share)) * length * sum(store.kv_heads * full for store, _, full in stores)
    assert entries == heads * always or allocated <= allowed
    assert entries == heads * length or allocated + allocated / entries > allowed


@pytest.mark.few(12)
@pytest.mark.filterwarnings("ignore:compilerkv has no tables")
@pytest.mark.parametrize("method", keepset.METHODS)
def test_what_an_entry_is_said_to_take_is_what_it_takes(method: str) -> None:
    model = model_of("llama", torch.bfloat16)
    cache = keepset.Cache(model, recipe(method, 24))
    with torch.no_grad():
        model(prompt(1, 40), past_key_values=cache, logits_to_keep=1)
    for layer in cache.managed_layers.values():
        assert layer.store is not None
        assert layer.store.entry_bytes == cache.recipe.method.traits.entry_bytes(16, 16)


@pytest.mark.few(3)
@pytest.mark.parametrize("text", ENTRY)
def test_models_of_32_bits_keep_the_same_number(text: str) -> None:
    counts = [compressed(text, 0.3, "llama", 40, dtype).keep_set for dtype in (torch.float32, *HALF)]
    numbers = [kept.entries for kept in counts if kept is not None]
    assert len(numbers) == 3 and len(set(numbers)) == 1


@pytest.mark.parametrize("text", [*ONE_BY_ONE, *TOGETHER])
def test_a_cache_says_its_share_of_a_full_16_bit_cache(text: str) -> None:
    """Also on a model of 32 bits, with padding, and after tokens that came later."""
    model, (ids, mask) = model_of("llama", torch.float32), padded_prompt([0, 11], 40)
    named = text.replace("FILE", str(statistics("llama")))
    cache = keepset.Cache(model, keepset.Recipe.parse(named).with_budget(bytes=0.4))
    feed(model, cache, ids, mask)
    for later_tokens, tokens in ((0, 40 + 29), (3, 43 + 32)):
        if later_tokens:
            feed(model, cache, prompt(2, later_tokens), torch.cat([mask, mask.new_ones(2, later_tokens)], 1))
        entries = sum(store.entries for layer in cache.managed_layers.values() if (store := layer.store) is not None)
        # In 4 bits new tokens have a residual.
        again = 2 * 2 * 3 * 2 * (8 + 8 + 2 + 2 + 4) if later_tokens and "bits=4" in text else 0
        assert cache.share == pytest.approx((entries * ENTRY[text](16, 16) + again) / (2 * 2 * tokens * 2 * 2 * 16))


def test_a_saved_file_goes_on_in_bytes(tmp_path: Any) -> None:
    cache = compressed("quantized(snapkv(window=2))", 0.25, "llama", 40, torch.float32)
    cache.save(tmp_path / "context.safetensors")
    again = keepset.Cache.load(tmp_path / "context.safetensors", model_of("llama", torch.float32))
    assert again.recipe == cache.recipe and str(again.recipe) == "quantized(snapkv(window=2), bytes=0.25)"
