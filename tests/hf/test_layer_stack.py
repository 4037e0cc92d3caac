"""Layers that are chosen from together keep what each keeps alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import keepset
from keepset.core.budget import Budget
from keepset.core.observation import Observation
from keepset.hf import layer_stack
from tests.hf.models import GREEDY, padded_or_not, padded_prompt, same_keep_set, tiny

NEW = 26
METHODS = [
    "knorm(OPTIONS)",
    "lagkv(lag=5, skip=2, OPTIONS)",
    "distilled(OPTIONS)",
    "adakv(distilled, OPTIONS)",
    "pool(distilled, OPTIONS)",
    "distilled(threshold=1.0, OPTIONS)",
    "quantized(pool(knorm), OPTIONS)",
]


def decoded(name: str, text: str, padding: list[int]) -> tuple[Tensor, keepset.Cache]:
    """What a model says after a prompt under a recipe, and the cache with all of its events."""
    model = tiny(name)
    ids, mask = padded_prompt(padding, 19)
    past = keepset.Cache(model, text, history=True)
    with torch.no_grad():
        said = model.generate(ids, attention_mask=mask, past_key_values=past, max_new_tokens=NEW, **GREEDY)
    return torch.stack(said.logits), past


@pytest.mark.few(4)
@pytest.mark.cross
@padded_or_not
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])  # the latter has windows between its full layers
def test_layers_together_keep_what_each_keeps_alone(
    name: str, method: str, padding: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = method.replace("OPTIONS", f"keep=14, every=8, prefill={name == 'llama'}")
    chooser, shown = type(keepset.Recipe.parse(text).method), list[Sequence[int]]()
    select_all = chooser.select_all

    def select(self: keepset.Method, observations: Sequence[Observation], budget: Budget) -> keepset.KeepSet:
        shown.extend(each.layer_ids for each in observations)
        return select_all(self, observations, budget)

    monkeypatch.setattr(chooser, "select_all", select)
    together, past = decoded(name, text, padding)
    assert max(map(len, shown)) == len(past.compressed_layers)
    if "distilled" in method:  # networks see one layer after another
        monkeypatch.setattr(layer_stack, "CACHE_BLOCK", 1)
        assert torch.equal(together, decoded(name, text, padding)[0])
    shown.clear()
    monkeypatch.setattr(layer_stack, "_WORKSPACE", 0)
    alone, other = decoded(name, text, padding)
    assert max(map(len, shown)) == 1
    assert len(past.events) == len(other.events) > 2
    assert all(
        same_keep_set(a.keep_set, b.keep_set) and a.entries == b.entries
        for a, b in zip(past.events, other.events, strict=True)
    )
    assert torch.equal(together, alone)
    assert past.nbytes == other.nbytes
