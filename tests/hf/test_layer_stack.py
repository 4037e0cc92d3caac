"""Layers that are chosen from together keep what each keeps alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import keepset
from keepset.core.budget import Budget
from keepset.core.observation import Observation
from keepset.hf import layer_stack
from tests.hf.models import generate, padded_or_not, padded_prompt, same_keep_set, tiny

METHODS = [
    "distilled(OPTIONS)",
    "adakv(distilled, OPTIONS)",
    "pool(distilled, OPTIONS)",
    "quantized(pool(knorm), OPTIONS)",
]
"""Networks see one layer after another. Random walks meet the other methods."""


@pytest.mark.few(2)
@pytest.mark.cross
@padded_or_not
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])  # the latter has windows between its full layers
def test_layers_together_keep_what_each_keeps_alone(
    name: str, method: str, padding: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = method.replace("OPTIONS", f"keep=14, every=8, prefill={name == 'llama'}")
    chooser, shown = type(keepset.Recipe.parse(text).method), list[Sequence[int]]()
    select_all, (ids, mask) = chooser.select_all, padded_prompt(padding, 19)

    def select(self: keepset.Method, observations: Sequence[Observation], budget: Budget) -> keepset.KeepSet:
        shown.extend(each.layer_ids for each in observations)
        return select_all(self, observations, budget)

    monkeypatch.setattr(chooser, "select_all", select)
    runs = []
    for limit in ("", "CACHE_BLOCK", "_WORKSPACE"):
        if limit:
            monkeypatch.setattr(layer_stack, limit, limit == "CACHE_BLOCK")
        past = keepset.Cache(tiny(name), text, history=True)
        said = generate(tiny(name), ids, past, mask, max_new_tokens=18)
        runs.append((torch.stack(said.logits), past))
        assert max(map(len, shown)) == (1 if limit == "_WORKSPACE" else len(past.compressed_layers))
        shown.clear()
    (together, past), *others = runs
    for logits, other in others:
        assert torch.equal(together, logits) and past.nbytes == other.nbytes
        assert len(past.events) == len(other.events) > 1
        for a, b in zip(past.events, other.events, strict=True):
            assert same_keep_set(a.keep_set, b.keep_set) and a.entries == b.entries
