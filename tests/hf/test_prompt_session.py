"""One prefill serves every recipe as well as a prefill of its own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset.hf.prompt_session import PromptSession
from tests.hf.models import prompt, recipe, same_keep_set, tiny

LENGTH = 60
RECIPES = [
    *(
        keepset.Recipe.parse(recipe(method, keep))
        for method, keep in zip(keepset.METHODS, itertools.cycle((15, 0.4)), strict=False)
    ),
    keepset.Recipe.parse("adakv(expected_attention(future=16), keep=15)"),
    keepset.Recipe.parse("pyramid(h2o, keep=15)"),
]


@torch.no_grad()
def follow(model: Any, cache: Any, ids: Tensor) -> Tensor:
    return model(ids, past_key_values=cache).logits


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma3", "qwen3"))]
)
def test_shared_prefill_is_as_good_as_ones_own(architecture: str) -> None:
    model, ids, after = tiny(architecture), prompt(1, LENGTH), prompt(1, 9, seed=1)
    session = PromptSession(model, ids, RECIPES)
    for text in RECIPES:
        cached = session.compress(text)
        shared = cached.cache
        alone = keepset.Cache(model, text)
        torch.testing.assert_close(follow(model, alone, ids)[:, -1], cached.logits, rtol=1e-4, atol=1e-5)
        assert same_keep_set(shared.keep_set, alone.keep_set), text
        assert (shared.nbytes, shared.get_seq_length()) == (alone.nbytes, LENGTH)
        torch.testing.assert_close(follow(model, shared, after), follow(model, alone, after), rtol=1e-4, atol=1e-5)
