"""Entries that are scored by their hidden states while they are written, against the formulas and a list of entries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset import Recipe
from keepset.core.statistics import Statistics, load, save
from keepset.errors import KeepsetError
from keepset.hf.prompt_session import Recorder
from tests.core.test_hidden_predictor import naive_scores
from tests.hf.models import hidden_states, left_padded, prompt, statistics, tiny
from tests.methods.naive import EXACT


def measured(model: Any) -> Statistics:
    return load("", model.config.name_or_path)


METHODS = ["kvzap", "fast_kvzip"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3", "cohere"])
def test_a_prompts_scores_are_those_of_its_hidden_states(architecture: str, method: str) -> None:
    """With padding on the left; cohere's attention shares its input with the layer's network."""
    model = tiny(architecture)
    measured(model)  # before its own forwards could be seen
    ids, mask = left_padded(prompt(2, 13), [0, 4])
    recipe = Recipe.parse(f"{method}(keep=0.5)")
    with torch.no_grad(), hidden_states(model) as states:
        recorder = Recorder(model, recipe.method.traits.needs)
        model(ids, attention_mask=mask, past_key_values=recorder, use_cache=True)
    for observation in recorder.observations:
        scores = recipe.method.score(observation)
        module = measured(model).hidden[method][observation.layer]
        (hidden,) = states[observation.layer]
        for request, padding in enumerate([0, 4]):
            expected = naive_scores(module, hidden[request, padding:])
            torch.testing.assert_close(scores[request, :, : 13 - padding], expected, rtol=1e-4, atol=1e-5)


def replayed(scores: Tensor, budget: int, sinks: int, recent: int, events: list[int]) -> list[list[int]]:
    """The positions that each head keeps, by the scores of all tokens `[kv_heads, tokens]`, event after event."""
    heads: list[list[int]] = [[] for _ in scores]
    before = 0
    for length in events:
        for head, held in enumerate(heads):
            entries = [*held, *range(before, length)]
            always = [at for at in entries if at < sinks or at >= length - recent]
            rest = sorted(set(entries) - set(always), key=lambda at: (-float(scores[head, at]), at))
            heads[head] = sorted(always + rest[: budget - len(always)])
        before = length
    return [entries + list(range(before, scores.shape[1])) for entries in heads]


@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_decoded_tokens_are_scored_as_they_come(method: str, prefill: bool) -> None:
    """Every token has the score of the hidden state with which it was written, whatever was dropped since."""
    model, tokens = tiny("llama"), 12 + 17
    recipe = f"{method}(sinks=1, recent=2, keep=7, every=5{'' if prefill else ', prefill=False'})"
    ids = prompt(1, tokens, seed=3)
    cache = keepset.Cache(model, recipe)
    with torch.no_grad(), hidden_states(model) as states:
        model(ids[:, :12], past_key_values=cache, use_cache=True)
        model(ids[:, 12:14], past_key_values=cache, use_cache=True)
        model(ids[:, 14:21], past_key_values=cache, use_cache=True)  # passes over an event, and beyond another
        for at in range(21, tokens):
            model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
    events = [*([12] if prefill else []), 17, 22, 27]
    for layer, module in measured(model).hidden[method].items():
        hidden = torch.cat(states[layer], 1)[0]
        store = cache.managed_layers[layer].store
        assert store is not None
        kept = store.other_columns["positions"][0].tolist()
        assert kept == replayed(naive_scores(module, hidden), 7, 1, 2, events)


@pytest.mark.parametrize("method", METHODS)
def test_chunks_copies_and_taken_back_tokens_change_nothing(method: str) -> None:
    model, ids = tiny("llama"), prompt(2, 24, seed=4)
    recipe = f"{method}(sinks=1, recent=2, keep=7, every=6)"

    def positions(cache: keepset.Cache) -> list[Any]:
        stores = [layer.store for layer in cache.managed_layers.values()]
        return [store.other_columns["positions"].tolist() for store in stores if store is not None]

    with torch.no_grad():
        whole = keepset.Cache(model, recipe)
        model(ids[:, :12], past_key_values=whole, use_cache=True)
        chunks = keepset.Cache(model, recipe, prompt_length=12)
        for first in range(0, 12, 4):
            model(ids[:, first : first + 4], past_key_values=chunks, use_cache=True)
        assert positions(whole) == positions(chunks)
        other = prompt(2, 3, seed=9)
        model(other, past_key_values=chunks, use_cache=True)
        chunks.crop(-3)
        copied = chunks.fork()
        for cache in (whole, copied):
            for at in range(12, 24):
                model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        assert positions(whole) == positions(copied)


@pytest.mark.parametrize(
    "method", ["pool(fast_kvzip, sinks=1, recent=2", "int8(adakv(kvzap), recent=2", "kvzap(threshold=-0.5, recent=3"]
)
def test_every_entry_goes_on_with_its_score(method: str, tmp_path: Path) -> None:
    """Ragged heads, padding, 8 bits, another order of requests, and a file in the middle of an interval."""
    model, kind = tiny("llama"), "fast_kvzip" if "fast" in method else "kvzap"
    measured(model)
    ids, mask = left_padded(prompt(2, 30, seed=6), [0, 3])
    cache = keepset.Cache(model, f"{method}, keep=7, every=5)")
    with torch.no_grad(), hidden_states(model) as states:
        for first, last in ((0, 12), (12, 14), (14, 21), *((at, at + 1) for at in range(21, 30))):
            model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache, use_cache=True)
            if last == 24:
                cache.save(tmp_path / "context")
                cache = keepset.Cache.load(tmp_path / "context", model)
    cache.batch_select_indices(torch.tensor([1, 0]))
    for layer, module in measured(model).hidden[kind].items():
        hidden, store = torch.cat(states[layer], 1), cache.managed_layers[layer].store
        assert store is not None
        columns, exists = store.other_columns, store.exists
        for row, (request, padding) in enumerate([(1, 3), (0, 0)]):
            expected = naive_scores(module, hidden[request, padding:])
            for head in range(store.kv_heads):
                positions = columns["positions"][row, head][exists[row, head]].long()
                own = columns[f"score by {kind}"][row, head][exists[row, head]]
                assert 0 < len(positions) < 30 - padding
                torch.testing.assert_close(own, expected[head, positions], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", ["", ", keep=5"])
def test_a_threshold_of_kvzap_keeps_what_reaches_it(keep: str) -> None:
    """Entries below it go, unless they are among the newest; `keep` is a cap."""
    model, ids = tiny("llama"), prompt(1, 20)
    cache = keepset.Cache(model, f"kvzap(threshold=-0.5, recent=3{keep})")
    with torch.no_grad(), hidden_states(model) as states:
        model(ids, past_key_values=cache, use_cache=True)
    counts = set()
    for layer, module in measured(model).hidden["kvzap"].items():
        scores = naive_scores(module, states[layer][0][0])
        for head, row in enumerate(scores.tolist()):
            reach = [at for at, score in enumerate(row) if at >= 17 or score >= -0.5]
            if keep:
                rest = sorted((at for at in reach if at < 17), key=lambda at: -row[at])[:2]
                reach = sorted([*rest, 17, 18, 19])
            kept = cache.events[0].keep_set.positions(layer, 0, head).tolist()  # type: ignore[union-attr]
            assert kept == reach
            counts.add(len(kept))
    assert keep or len(counts) > 1


def test_16_bits_score_like_the_same_numbers_in_32() -> None:
    model = tiny("llama")
    with torch.no_grad():
        half = type(model)(model.config).bfloat16().eval()
        half.load_state_dict(model.state_dict())
    half.config.name_or_path = model.config.name_or_path
    recipe = Recipe.parse("fast_kvzip(keep=0.5)")
    with torch.no_grad(), hidden_states(half) as states:
        recorder = Recorder(half, recipe.method.traits.needs).prefill(prompt(1, 11))
    for observation in recorder.observations:
        expected = naive_scores(
            measured(model).hidden["fast_kvzip"][observation.layer], states[observation.layer][0][0]
        )
        torch.testing.assert_close(recipe.method.score(observation)[0], expected, **EXACT)


def test_files_without_modules_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "stats.safetensors"
    save(replace(load(str(statistics("llama"))), hidden={}), path)
    for method in METHODS:
        with pytest.raises(
            KeepsetError, match=f"hold no modules of {method}: make them again with keepset calibrate --im"
        ):
            keepset.Cache(tiny("llama"), f"{method}(stats={str(path)!r}, keep=0.5)")
