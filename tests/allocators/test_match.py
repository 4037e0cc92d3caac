"""`match` leaves the choice as it was, and fits the entries that stay to attention over all entries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import keepset
from keepset.allocators.post_processors import Match
from keepset.hf.prompt_session import PromptSession
from keepset.kernels.packed import BIAS
from keepset.lab import texts
from keepset.lab.compare.comparison import kl, mean
from keepset.recording import RecordedFeatures
from tests.allocators.fits import squared_errors, with_reference
from tests.hf.models import generate, left_padded, prompt, recipe, same_keep_set, tiny
from tests.methods.naive import Shape, every_shape, observe


@every_shape
@pytest.mark.parametrize("allocator", ["", "adakv", "pool"])
def test_every_head_is_fitted_as_if_alone(shape: Shape, allocator: str) -> None:
    """Output of attention over what stays, entry by entry, is nearer to that over all than with what was there."""
    inner = f"{allocator}(snapkv(window=3))" if allocator else "snapkv(window=3)"
    matching = keepset.Recipe.parse(f"match({inner}, keep=0.5)")
    observation = with_reference(observe(shape))
    kept = matching.select(observation).layer(0)
    assert same_keep_set(
        matching.select(observation), keepset.Recipe.parse(f"{inner[:-1]}, keep=0.5)").select(observation)
    )
    errors = squared_errors(observation, kept)
    for row in range(shape.batch * shape.kv_heads):
        request, head = divmod(row, shape.kv_heads)
        kept_indices = kept.indices[slice(*kept.cu_seqlens[row : row + 2].tolist())]
        elsewhere = torch.ones(shape.entries, dtype=torch.bool).index_fill(0, kept_indices, False)
        assert not kept.state[BIAS][request, head][elsewhere].any()
    assert errors[0] <= errors[1] * 0.5 or shape.entries < 6


def cached(text: str, ids: Tensor, mask: Tensor | None = None, **options: object) -> tuple[keepset.Cache, Tensor]:
    cache = keepset.Cache(tiny("llama"), text)
    output = generate(tiny("llama"), ids, cache, mask, **{"max_new_tokens": 4, **options})
    return cache, torch.stack(output.logits, 1)


@pytest.mark.full
def test_the_embedded_model_goes_on_as_with_the_full_cache() -> None:
    """Two to four times nearer than what the same entries give, on one text."""
    model, tokenizer = keepset.models.load()
    ids = tokenizer(texts.essay("gap"), return_tensors="pt")["input_ids"][:, :480]
    recipes = [keepset.Recipe.parse(text) for text in ("match(glance, keep=0.25)", "glance(keep=0.25)")]
    session = PromptSession(model, ids[:, :400], recipes)
    target = session.compress(None).follow(ids[:, 400:])
    near, far = (mean(kl(target, session.compress(recipe).follow(ids[:, 400:]))) for recipe in recipes)
    assert near < far / 1.5


def test_company_changes_nothing() -> None:
    """A prefill that serves recipes with more reference queries gives each its own."""
    ids, names = prompt(1, 40), [f"match(knorm, queries={number}, keep=12)" for number in (5, 40, 16)]
    recipes = [keepset.Recipe.parse(text) for text in names]
    together = PromptSession(tiny("llama"), ids, recipes)
    for matching in recipes:
        shared, alone = (
            session.compress(matching).cache.managed_layers
            for session in (together, PromptSession(tiny("llama"), ids, [matching]))
        )
        for layer in shared:
            columns, right = (layers[layer].store.packed for layers in (shared, alone))
            torch.testing.assert_close(columns, right)


def test_padding_and_chunks_change_nothing() -> None:
    ids, mask = left_padded(prompt(2, 40), [0, 7])
    text = "match(snapkv(window=5), queries=16, newest=9, keep=12)"
    batched, logits = cached(text, ids, mask)
    alone, single_logits = cached(text, ids[1:, 7:])
    for layer in batched.managed_layers:
        columns, single = (cache.managed_layers[layer].store.padded()[0] for cache in (batched, alone))
        for name in ("values", BIAS):
            torch.testing.assert_close(columns[name][1:], single[name], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(logits[1:], single_logits, rtol=1e-3, atol=1e-3)
    chunked = keepset.Cache(tiny("llama"), text, prompt_length=40)
    with torch.no_grad():
        for part in (ids[:1, :13], ids[:1, 13:29], ids[:1, 29:]):
            tiny("llama")(part, past_key_values=chunked, use_cache=True)
    for layer in batched.managed_layers:
        columns, single = (cache.managed_layers[layer].store.padded()[0] for cache in (batched, chunked))
        torch.testing.assert_close(columns["values"][:1, :, :12], single["values"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("inner", ["snapkv(window=4)", "adakv(snapkv(window=4))", "distilled"])
@torch.no_grad()
def test_events_while_decoding_leave_what_was_fitted(inner: str) -> None:
    """Nor is a query recorded for them."""
    model, fitted_entries = tiny("llama"), []
    cache = keepset.Cache(model, f"match({inner}, window=0, keep=16, every=8)")
    for start, tokens in ((0, 40), (40, 8), (48, 8)):
        model(prompt(1, 56)[:, start : start + tokens], past_key_values=cache, use_cache=True)
        columns, exists = cache.managed_layers[0].store.padded()
        fitted_entries.append({
            (head, int(columns["positions"][0, head, i])): (columns["values"][0, head, i].tolist(), bias)
            for head, i in exists[0].nonzero().tolist()
            if (bias := float(columns[BIAS][0, head, i])) or columns["positions"][0, head, i] < 40
        })  # fmt: skip
    first, *later = fitted_entries
    assert len(cache.events) == 3 and any(bias for _, bias in first.values())
    for entries in later:
        assert entries and all(first[key] == fitted for key, fitted in entries.items())
    assert RecordedFeatures.of(cache.recipe.method.traits.needs, every=8).reference is None


@pytest.mark.parametrize("inner", ["snapkv(window=4)", "adakv(snapkv(window=4))", "ams(tova, window=4)"])
def test_events_while_decoding_fit_again(inner: str) -> None:
    """Also entries that were fitted before: their biases are part of what attention gave."""
    ids = prompt(1, 40)
    always = ", sinks=2, recent=4" if inner.startswith("ams") else ""
    cache, logits = cached(f"match({inner}, window=8{always}, keep=16, every=8)", ids, max_new_tokens=30)
    assert len(cache.events) == 4 and logits.isfinite().all()
    for layer in cache.managed_layers.values():
        columns, exists = layer.store.padded()
        assert columns[BIAS][exists].any() and columns["values"][exists].isfinite().all()
        newest = columns["positions"] > 40 + 3 * 8
        assert not columns[BIAS][newest & exists].any()


def test_every_method_can_be_matched() -> None:
    for name in (name for name, kind in keepset.METHODS.items() if kind.stage == 0):
        method = Match(keepset.Recipe.parse(recipe(name, 12)).method)
        outer, inner = method.traits, method.scorer.traits
        assert (outer.layout, outer.across_layers) == (inner.layout, inner.across_layers)
        assert outer.needs | inner.needs == outer.needs
