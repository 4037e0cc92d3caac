"""Nested allocators in a cache: at the prompt's end and at events after it, its bytes are those of its budget."""

from __future__ import annotations

import pytest
import torch

import keepset
from keepset import Budget, Recipe, Schedule
from keepset.core.features.window import WindowAttention
from tests.allocators.nestings import AROUND, CAPS, Nesting, allowed, made
from tests.hf.models import prompt, tiny

PROMPT, SHARE, KEEP, EVERY, EVENTS = 40, 0.3, 12, 5, 3

SOME = [
    ("adakv", "pyramid", "snapkv"),
    ("pyramid", "adakv", "snapkv"),
    ("adakv", "chunkkv", "pyramid", "snapkv"),
    ("composite", "adakv", "ams", "snapkv"),
    ("pool", "ams", "uniform", "snapkv"),
    ("match", "dynamic", "adakv", "snapkv"),
    ("int8", "match", "adakv", "snapkv"),
    ("adakv", "gvote"),
    ("int8", "match", "reread"),
]


def check(nesting: Nesting) -> None:
    """Once at the prompt's end, by a fraction, then by a number while tokens come."""
    model, ids, method = tiny("llama"), prompt(1, PROMPT + EVERY * EVENTS), made(nesting)
    heads = model.config.num_key_value_heads * model.config.num_hidden_layers
    # Key, value, position, and what the method remembers; while tokens come also what it is shown of each entry.
    sizes = (1, 2) if "int8" in nesting else (4, 0)
    entry = 2 * sizes[0] * model.config.head_dim + 4 * (sizes[1] + 1 + len(method.traits.state_names))
    shown = 4 * len(method.traits.needs.of(WindowAttention))
    once = keepset.Cache(model, Recipe(method, Budget(SHARE, 2, 3)))
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=once)
    entries = int(SHARE * PROMPT) * heads
    assert once.keep_set is not None
    assert once.keep_set.entries <= entries and once.nbytes == once.keep_set.entries * entry
    if nesting[-1] not in CAPS:
        assert once.keep_set.entries > entries - heads
    if any(feature.prompt_only for feature in method.traits.needs):
        return
    cache = keepset.Cache(model, Recipe(method, Budget(KEEP, 2, 3), Schedule(every=EVERY)))
    for begin, end in [(0, PROMPT), *((token, token + 1) for token in range(PROMPT, ids.shape[1]))]:
        with torch.no_grad():
            model(ids[:, begin:end], past_key_values=cache)
        if (end - PROMPT) % EVERY == 0:
            assert cache.events[-1].length == end
            assert cache.keep_set.entries <= KEEP * heads and cache.nbytes_entries <= KEEP * heads * (entry + shown)
    assert len(cache.events) == EVENTS + 1


@pytest.mark.parametrize("nesting", SOME, ids="-".join)
def test_bytes_are_those_of_the_budget(nesting: Nesting) -> None:
    check(nesting)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:compilerkv has no tables")
@pytest.mark.parametrize("outermost", AROUND)
def test_of_any_nesting(outermost: str) -> None:
    for nesting in [nesting for nesting in allowed() if nesting[0] == outermost][::5]:
        if nesting[-1] not in ("duo_attention", "kvzip"):  # which ask for a file and a tokenizer
            check(nesting)
