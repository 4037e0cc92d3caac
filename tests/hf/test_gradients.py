"""A model that is called outside of `torch.no_grad()`, as in most scripts."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import keepset
from tests.hf.models import prompt, same_keep_set, tiny

RECIPES = [
    "expected_attention(future=16, buffer=8, keep=14, every=8)",
    "ams(tova, window=5, min_segment=2, max_segment=6, recent=4, keep=14, every=8)",
    "pool(distilled, keep=14, every=8)",
    "quantized(match(snapkv(window=5), window=5), keep=14)",
    "reread(recent=4, keep=0.5)",
]


def said(recipe: str) -> tuple[Tensor, keepset.Cache]:
    past = keepset.Cache(tiny("llama"), recipe)
    steps = [prompt(1, 40), *prompt(1, 8, seed=1).T[:, None]]
    return torch.cat([tiny("llama")(ids, past_key_values=past).logits[0] for ids in steps]), past


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_change_nothing_and_an_event_lets_go_of_them(recipe: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        logits, past = said(recipe)
    with torch.no_grad():
        expected, other = said(recipe)
    assert logits.requires_grad and torch.equal(logits, expected)
    assert past.keep_set is not None and other.keep_set is not None
    assert same_keep_set(past.keep_set, other.keep_set)
    if "every" in recipe:  # the last token was an event
        stores = [layer.store for layer in past.managed_layers.values() if layer.store is not None]
        assert stores and not any(
            store.heads.keys.requires_grad or store.heads.values.requires_grad for store in stores
        )
