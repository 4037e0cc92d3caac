"""One model that several threads use at once, each with caches of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import keepset
from keepset.core.tables import save
from tests.core.test_tables import random_tables
from tests.hf.models import generate, prompt, same_keep_set, tiny
from tests.hf.test_statistics import shape_of

COMPILED = "compilerkv(tables={tables!r}, window=5, elastic=True, keep=12)"
RECIPES = (
    "reread(keep=12)",
    "glance(keep=12)",
    "gvote(p_nuc=0.9, future=16, keep=12)",
    COMPILED,
    "criticalkv(expected_attention(future=16), keep=12)",
    "expected_attention(future=16, keep=12, every=3)",
    "match(adakv(snapkv(window=4)), window=5, keep=12)",
    "kvzip(keep=12)",
)
"""They look at second passes, hidden states and rotations, logits, weights, and queries while decoding."""


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def tables(tmp_path: Path, name: str) -> str:
    save(random_tables(*shape_of(tiny(name))), tmp_path / "tables")
    return str(tmp_path / "tables")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("name", "times"),
    [("llama_shallow", 1), *(pytest.param(name, 4, marks=pytest.mark.full) for name in ("llama", "gemma3"))],
)
def test_threads_share_a_model(name: str, times: int, tables: str) -> None:
    model = tiny(name)

    def answer(index: int) -> Tensor:
        ids = prompt(1 + index % 2, 30 + 3 * index, seed=index)
        cache = keepset.Cache(model, RECIPES[index].format(tables=tables))
        return generate(model, ids, cache, max_new_tokens=5).sequences

    expected = [answer(index) for index in range(len(RECIPES))]
    turns = [*range(len(RECIPES))] * times
    with ThreadPoolExecutor(4) as pool:
        for index, answered in zip(turns, pool.map(answer, turns), strict=True):
            assert torch.equal(answered, expected[index]), RECIPES[index]


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("recipe", [COMPILED, RECIPES[2]])
@torch.no_grad()
def test_calls_between_a_call_and_its_end(name: str, recipe: str, tables: str) -> None:
    """Another thread's calls run while one with the cache is about to enter its last layer."""
    model, ids, text = tiny(name), prompt(1, 30), recipe.format(tables=tables)
    expected = generate(model, ids, keepset.Cache(model, text), max_new_tokens=5).sequences

    def others(*_: object) -> None:
        handle.remove()
        with ThreadPoolExecutor(1) as pool:
            list(pool.map(model, [prompt(1, 20, seed=1), prompt(1, 20, seed=2)]))

    handle = model.model.layers[-1].register_forward_pre_hook(others)
    assert torch.equal(generate(model, ids, keepset.Cache(model, text), max_new_tokens=5).sequences, expected)


@torch.no_grad()
def test_hooks_that_go_while_another_call_meets_them() -> None:
    model = tiny("llama")
    cache = keepset.Cache(model, "glance(keep=12)")
    handle = model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: cache.stop_watching(), prepend=True)
    try:
        model(prompt(1, 4))
    finally:
        handle.remove()


def test_caches_are_made_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers marks a model's configurations while it switches the attention implementation."""
    model, switching = tiny("llama"), list[str]()

    def switch(implementation: str) -> None:
        switching.append(implementation)
        time.sleep(0.01)
        assert len(switching) == 1
        switching.clear()

    monkeypatch.setattr(model, "set_attn_implementation", switch)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: keepset.Cache(model, "knorm(keep=4)"), range(4)))


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["expected_attention(future=16, buffer=6, keep=12, every=4)", "reread(keep=12)"])
@pytest.mark.parametrize("first", ["full_attention", "sliding_attention"])
def test_a_fork_beside_its_original_sees_its_own_calls(
    first: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model makes its two rotations in any order: hooks of both caches see every call of the model."""
    kinds = sorted(["full_attention", "sliding_attention"], key=lambda kind: kind != first)
    # transformers goes through a set, whose order differs from process to process.
    monkeypatch.setattr("transformers.models.gemma3.modeling_gemma3.set", lambda _: kinds, raising=False)
    model, ids, later = tiny("gemma3"), prompt(1, 30), prompt(1, 10, seed=1)
    alone, original = keepset.Cache(model, recipe, prompt_length=40), keepset.Cache(model, recipe, prompt_length=40)
    for cache in (alone, original):
        model(ids, past_key_values=cache)
    fork = original.fork()
    for part in (slice(0, 5), slice(5, 10)):
        for cache in (alone, fork, original):
            model(later[:, part], past_key_values=cache)
    assert alone.events and same_keep_set(alone.keep_set, fork.keep_set)
    assert same_keep_set(alone.keep_set, original.keep_set)
