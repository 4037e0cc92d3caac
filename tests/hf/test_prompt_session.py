"""One prefill serves every recipe as well as a prefill of its own, and copies of a cache are independent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset.hf.prompt_session import PromptSession
from tests.hf.models import padded_or_not, padded_prompt, prompt, recipe, same_keep_set, tiny

LENGTH = 60
RECIPES = [
    *(
        keepset.Recipe.parse(recipe(method, keep))
        for method, keep in zip(keepset.METHODS, itertools.cycle((15, 0.4)), strict=False)
    ),
    keepset.Recipe.parse("adakv(expected_attention(future=16), keep=15)"),
    keepset.Recipe.parse("pyramid(h2o, keep=15)"),
]
architectures = pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma3", "qwen3"))]
)


@torch.no_grad()
def follow(model: Any, cache: Any, ids: Tensor) -> Tensor:
    return model(ids, past_key_values=cache).logits


@architectures
def test_shared_prefill_is_as_good_as_ones_own(architecture: str) -> None:
    model, ids, after = tiny(architecture), prompt(1, LENGTH), prompt(1, 9, seed=1)
    session = PromptSession(model, ids, RECIPES)
    for text in RECIPES:
        cached = session.compress(text)
        shared = cached.cache
        own = keepset.Cache(model, text)
        torch.testing.assert_close(follow(model, own, ids)[:, -1], cached.logits, rtol=1e-4, atol=1e-5)
        assert same_keep_set(shared.keep_set, own.keep_set), text
        assert (shared.nbytes, shared.get_seq_length()) == (own.nbytes, LENGTH)
        torch.testing.assert_close(follow(model, shared, after), follow(model, own, after), rtol=1e-4, atol=1e-5)


def test_a_recipe_leaves_the_prompt_as_it_was() -> None:
    model, ids = tiny("gemma3"), prompt(1, LENGTH)
    session = PromptSession(model, ids, RECIPES)
    once, again = (
        [follow(model, session.compress(text).cache, prompt(1, 30, seed=1)) for text in RECIPES] for _ in range(2)
    )
    assert all(map(torch.equal, once, again))


# --- copies


def prefilled(architecture: str, text: str, ids: Tensor, mask: Tensor) -> keepset.Cache:
    cache = keepset.Cache(tiny(architecture), text)
    with torch.no_grad():
        tiny(architecture)(ids, attention_mask=mask, past_key_values=cache)
    return cache


@torch.no_grad()
def appended(architecture: str, cache: keepset.Cache, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits of these tokens, the last ones one at a time."""
    model, logits = tiny(architecture), []
    for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
        mask = torch.nn.functional.pad(mask, (0, part.shape[1]), value=1)
        logits.append(model(part, attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(logits, 1)


@pytest.mark.cross
@architectures
@pytest.mark.parametrize(
    "text", ["snapkv(window=5, keep=12)", "pyramid(snapkv(window=4), keep=12)", "adakv(expected_attention, keep=12)"]
)
@padded_or_not
def test_copies_do_not_see_each_other(architecture: str, text: str, padding: list[int]) -> None:
    ids, mask = padded_prompt(padding, 40)
    # More tokens than a sliding window of the tiny models holds.
    turns = [prompt(2, length, seed=seed) for seed, length in ((1, 30), (2, 28), (3, 5))]
    expected = [appended(architecture, prefilled(architecture, text, ids, mask), turn, mask) for turn in turns]

    first = prefilled(architecture, text, ids, mask)
    second = first.fork()
    third = second.fork()
    nbytes = first.nbytes
    assert (second.nbytes, third.nbytes) == (nbytes, nbytes)
    for cache, turn, logits in zip((second, first, third), turns, expected, strict=True):
        assert cache.get_seq_length() == 40
        assert torch.equal(appended(architecture, cache, turn, mask), logits)
        assert cache.get_seq_length() == 40 + turn.shape[1]
    assert same_keep_set(first.keep_set, third.keep_set)


def test_a_copy_may_be_cropped_reordered_and_reset_by_itself() -> None:
    ids, mask = padded_prompt([0, 7], 40)
    turn = prompt(2, 6, seed=1)
    expected = appended("gemma3", prefilled("gemma3", "adakv(tova, keep=12)", ids, mask), turn, mask)
    cache = prefilled("gemma3", "adakv(tova, keep=12)", ids, mask)
    twin = cache.fork()
    twin.reorder_cache(torch.tensor([1, 0]))
    flipped = appended("gemma3", twin, turn.flip(0), mask.flip(0))
    torch.testing.assert_close(flipped.flip(0), expected, rtol=1e-4, atol=1e-5)
    twin.reset()
    assert twin.get_seq_length() == 0 and twin.events == []
    assert len(cache.events) == 1
    assert torch.equal(appended("gemma3", cache, turn, mask), expected)
