"""Operations on whole caches: each changes all layers, or raises and changes none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from tests.hf.models import generate, prompt, tiny
from tests.hf.test_refusals import refusal

LENGTH = 40


@torch.no_grad()
def following(model: Any, cache: keepset.Cache) -> Tensor:
    """Return what a few more tokens predict on a fork."""
    ids = prompt(len(cache.progress.tokens), 4, 3)
    return model(ids, past_key_values=cache.fork(), use_cache=True).logits


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda cache: cache.crop(-2), "cannot take back 2 tokens, so no layer has"),
        (lambda cache: cache.crop(LENGTH), "cannot take back 3 tokens, so no layer has"),
        (lambda cache: cache.crop(-9), "Only the 3 tokens after the compression"),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 2])), "indices from 0 to 1"),
        (lambda cache: cache.batch_select_indices(torch.tensor([-3])), "indices from 0 to 1"),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, False])), "at least one of them"),
        (lambda cache: cache.batch_select_indices(torch.tensor([True])), "a mask of 2"),
        (lambda cache: cache.batch_repeat_interleave(0), "at least one of them"),
        (lambda cache: cache.batch_repeat_interleave(-1), "at least one of them"),
    ],
)
@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_a_refused_change_changes_nothing(name: str, change: Callable[[keepset.Cache], None], words: str) -> None:
    model = tiny(name)
    cache = keepset.Cache(model, "snapkv(window=4, kernel=3, keep=12)")
    generate(model, prompt(2, LENGTH), cache, max_new_tokens=4)
    expected, tokens = following(model, cache), list(cache.progress.tokens)
    with refusal(words):
        change(cache)
    assert cache.progress.tokens == tokens and cache.get_seq_length() == LENGTH + 3
    assert torch.equal(following(model, cache), expected)


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
@torch.no_grad()
def test_half_a_prompt_is_not_reordered(name: str) -> None:
    model = tiny(name)
    cache = keepset.Cache(model, "h2o(keep=12)", prompt_length=LENGTH)
    model(prompt(2, 10), past_key_values=cache)
    expected = following(model, cache)
    with refusal("before its prompt is complete"):
        cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(following(model, cache), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_rows_are_chosen_alike_in_every_way(name: str) -> None:
    model = tiny(name)
    cache = keepset.Cache(model, "snapkv(window=4, kernel=3, keep=12)")
    generate(model, prompt(3, LENGTH), cache, max_new_tokens=4)
    changes: list[tuple[Callable[[keepset.Cache], None], list[int]]] = [
        (lambda past: past.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda past: past.batch_select_indices(torch.tensor([-1, 1])), [2, 1]),
        (lambda past: past.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda past: past.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ]
    ids = prompt(3, 4, 3)
    with torch.no_grad():
        expected = model(ids, past_key_values=cache.fork(), use_cache=True).logits
        for change, rows in changes:
            past = cache.fork()
            change(past)
            logits = model(ids[rows], past_key_values=past, use_cache=True).logits
            assert torch.allclose(logits, expected[rows], atol=1e-5)


@torch.no_grad()
def test_a_window_that_recorded_its_past_is_taken_back_as_far_as_it_did() -> None:
    model, ids = tiny("gemma3"), prompt(1, LENGTH + 12)
    cache = keepset.Cache(model, "knorm(keep=1.0)")
    model(ids[:, :LENGTH], past_key_values=cache)
    cache.activate_past_recording()
    model(ids[:, LENGTH : LENGTH + 4], past_key_values=cache)
    expected = following(model, cache)
    model(ids[:, LENGTH + 4 :], past_key_values=cache)
    cache.crop(LENGTH + 4)
    assert torch.allclose(following(model, cache), expected, atol=1e-5)
    with refusal("cannot take back 2 tokens"):
        cache.crop(-2)
    assert torch.allclose(following(model, cache), expected, atol=1e-5)
