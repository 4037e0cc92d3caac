"""Caches that go on together, against each of them going on alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset.hf.join import can_join, join
from tests.hf.models import prompt, tiny

RECIPES = [
    "streaming_llm(keep=1.0)",
    "snapkv(window=4, keep=0.3)",
    "adakv(snapkv(window=4), keep=0.3)",
    "pyramid(snapkv(window=4), keep=0.4)",
    "gvote",
    "streaming_llm(sinks=1, keep=1)",
]


def model_of(name: str) -> Any:
    return copy.deepcopy(tiny("llama")).bfloat16() if name == "bfloat16" else tiny(name)


@torch.no_grad()
def cached(model: Any, tokens: int = 21) -> list[keepset.Cache]:
    caches = [keepset.Cache(model, recipe) for recipe in RECIPES]
    for cache in caches:
        model(prompt(1, tokens), past_key_values=cache)
    return caches


@torch.no_grad()
def told(model: Any, cache: keepset.Cache, tokens: Tensor) -> Tensor:
    return model(tokens, past_key_values=cache).logits.float()


@pytest.mark.cross
@pytest.mark.parametrize("architecture", ["llama", "llama_mqa", "llama_odd_head", "qwen3", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 21])
def test_each_goes_on_as_it_would_alone(architecture: str, tokens: int) -> None:
    model = model_of(architecture)
    alone, caches = cached(model, tokens), cached(model, tokens)
    nbytes = sum(cache.nbytes for cache in caches)
    assert all(can_join(cache) for cache in caches)
    joined, rows = join(caches), list(range(len(RECIPES)))
    assert joined is caches[0] and joined.nbytes == nbytes
    assert [cache.nbytes for cache in caches[1:]] == [0] * (len(RECIPES) - 1)
    tolerance = dict(rtol=0.0, atol=0.1 if architecture == "bfloat16" else 1e-4)
    spread = 0.0
    for step, (n, stay) in enumerate([(5, rows), (1, rows), (1, [4, 1, 2]), (3, [2, 0]), (70, [1])]):
        if stay != rows:
            joined.batch_select_indices(torch.tensor(stay))
            rows = [rows[row] for row in stay]
        new = prompt(len(RECIPES), n, seed=step)[rows]
        together = told(model, joined, new)
        for row, recipe in enumerate(rows):
            expected = told(model, alone[recipe], new[row : row + 1])
            torch.testing.assert_close(together[row : row + 1], expected, **tolerance)
            assert joined.get_seq_length() == alone[recipe].get_seq_length()
        spread = max(spread, float((together[0] - together[-1]).abs().max()))
    assert spread > 0.1


def test_it_can_be_forked_and_cropped() -> None:
    model = tiny("llama")
    joined, new = join(cached(model)), prompt(len(RECIPES), 3, seed=1)
    fork = joined.fork()
    expected = told(model, joined, new)
    joined.crop(-3)
    torch.testing.assert_close(told(model, joined, new), expected)
    torch.testing.assert_close(told(model, fork, new), expected)


def test_one_alone_stays_as_it_is() -> None:
    cache = cached(tiny("gemma3"))[0]
    nbytes = cache.nbytes
    assert not can_join(cache) and join([cache]) is cache and cache.nbytes == nbytes


def test_what_cannot_be_joined() -> None:
    model = tiny("llama")
    again, fresh, padded, good = (
        keepset.Cache(model, recipe) for recipe in ("knorm(keep=4, every=3)", *["knorm(keep=4)"] * 3)
    )
    mask = torch.ones(1, 21, dtype=torch.long)
    with torch.no_grad():
        model(prompt(1, 21), past_key_values=again)
        model(prompt(1, 21), past_key_values=good)
        mask[:, :3] = 0
        model(prompt(1, 21), attention_mask=mask, past_key_values=padded)
    assert [can_join(cache) for cache in (again, fresh, padded, good)] == [False, False, False, True]
    with torch.no_grad():
        lfm2 = tiny("lfm2")
        cache = keepset.Cache(lfm2, "knorm(keep=4)")
        lfm2(prompt(1, 21), past_key_values=cache)
    assert not can_join(cache)
