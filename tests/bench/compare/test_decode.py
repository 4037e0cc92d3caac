"""Figures of decoding against a loop that feeds one token after another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

import keepset
from keepset.bench.candidate import grid
from keepset.bench.compare import decode
from keepset.bench.compare.decode import DecodeComparer, feed_slices
from keepset.bench.generation import greedy
from keepset.bench.record import Record
from keepset.hf.store import SLACK
from tests.hf.models import full, prompt, tiny

BEFORE, AFTER = 40, 75
RECIPES = [
    "snapkv(window=5, keep=20, every=8)",
    pytest.param("tova(keep=12, every=1)", marks=pytest.mark.full),
    pytest.param("knorm(keep=30, every=70)", marks=pytest.mark.full),
    "adakv(snapkv(window=5), keep=20, every=16)",
    "pyramid(knorm, keep=20, every=16)",
    "expected_attention(future=16, buffer=12, keep=16, every=10)",
    "streaming_llm(keep=25, every=13, prefill=False)",
    pytest.param("random(keep=20, every=6, prefill=False)", marks=pytest.mark.full),
    pytest.param("tova(keep=12)", marks=pytest.mark.full),
]


@dataclass
class Naive:
    """One token at a time: log-probabilities and bytes after each, and events so far."""

    steps: list[list[float]]
    nbytes: list[int]
    recorded: int
    events: list[int]


@torch.no_grad()
def naive(cache: Any, architecture: str = "llama") -> Naive:
    model, ids = tiny(architecture), prompt(1, BEFORE + AFTER)
    model(ids[:, :BEFORE], past_key_values=cache)
    steps, nbytes, recorded = [], [], 0
    for token in ids[0, BEFORE:]:
        logits = model(token[None, None], past_key_values=cache).logits[0, -1]
        steps.append(logits.double().log_softmax(-1).tolist())
        if isinstance(cache, keepset.Cache):
            nbytes.append(cache.nbytes)
            windows = [layer.decoding.recorder.nbytes for layer in cache.layers if layer.decoding is not None]
            stores = [layer.store.packed for layer in cache.layers]
            sums = [column.nbytes for store in stores for name, column in store.items() if name.startswith("received")]
            recorded = max(recorded, sum(windows) + sum(sums))
        else:
            nbytes.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))
    return Naive(steps, nbytes, recorded, [event.length for event in getattr(cache, "events", [])])


def reference(architecture: str = "llama") -> Naive:
    model = tiny(architecture)
    model.set_attn_implementation("sdpa")
    return naive(DynamicCache(config=model.config), architecture)


def comparer(architecture: str = "llama") -> DecodeComparer:
    ids = prompt(1, BEFORE + AFTER)
    return DecodeComparer(tiny(architecture), ids[:, :BEFORE], ids[:, BEFORE:], architecture)


def measured(text: str, architecture: str = "llama") -> Record:
    (row,) = comparer(architecture).run(grid([keepset.Recipe.parse(text)], []))
    return row


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def divergence(step: list[float], other: list[float]) -> float:
    return sum(math.exp(p) * (p - q) for p, q in zip(step, other, strict=True))


def best(step: list[float]) -> int:
    return max(range(len(step)), key=step.__getitem__)


@pytest.mark.parametrize("text", RECIPES)
def test_figures_are_those_of_one_token_at_a_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "DRIFT_TOKENS", 32)
    expected, ids = reference(), prompt(1, BEFORE + AFTER)[0].tolist()
    cache = keepset.Cache(tiny("llama"), text)
    ours = naive(cache)
    one = comparer()
    (row,) = one.run(grid([keepset.Recipe.parse(text)], []))
    assert row.error is None

    kl = [divergence(a, b) for a, b in zip(expected.steps, ours.steps, strict=True)]
    first = ours.events[0] - BEFORE
    assert row.figures["kl"] == pytest.approx(mean(kl[first:]), rel=1e-3, abs=1e-6)
    assert row.figures["kl"] > 1e-3
    assert row.curves["kl_drift"] == pytest.approx(
        [mean(kl[i : i + 32]) for i in range(0, AFTER, 32)], rel=1e-3, abs=1e-6
    )
    deltas = [
        expected.steps[i][ids[BEFORE + i + 1]] - ours.steps[i][ids[BEFORE + i + 1]] for i in range(first, AFTER - 1)
    ]
    assert row.figures["nll_delta"] == pytest.approx(mean(deltas), abs=1e-4)
    same = [best(a) == best(b) for a, b in zip(expected.steps, ours.steps, strict=True)]
    assert row.figures["top1"] == pytest.approx(mean([float(each) for each in same[first:]]))
    # Queries for the next event come one after another; a piece is counted with all that it recorded.
    exact, recording = round(mean(ours.nbytes[first:])), ours.recorded
    assert exact <= row.figures["kv_bytes"] <= exact + recording
    assert row.figures["kv_bytes_peak"] == max(ours.nbytes[first:])
    assert row.figures["kv_bytes_full"] == round(mean(expected.nbytes[first:]))

    (kept,) = one.comparison.kept
    assert kept is not None and cache.keep_set is not None
    assert kept.shape == (2, 2, BEFORE + AFTER)
    for layer in range(2):
        for head in range(2):
            held = [*cache.keep_set.positions(layer, 0, head).tolist(), *range(ours.events[-1], BEFORE + AFTER)]
            assert kept[layer, head].nonzero()[:, 0].tolist() == held
    assert row.figures["keep"] == pytest.approx(float(kept.float().mean()))


def test_the_full_cache() -> None:
    expected, ids = reference(), prompt(1, BEFORE + AFTER)[0].tolist()
    figures = comparer().comparison.full
    assert figures["kv_bytes"] == round(mean(expected.nbytes)) and figures["kv_bytes_peak"] == max(expected.nbytes)
    nll = [-step[ids[BEFORE + i + 1]] for i, step in enumerate(expected.steps[:-1])]
    assert figures["nll"] == pytest.approx(mean(nll), abs=1e-5)
    assert figures["prefill_seconds"] > 0 and figures["decode_tokens_per_second"] > 0


@pytest.mark.cross
@pytest.mark.parametrize("method", ["tova", "adakv(snapkv(window=5))", "expected_attention(future=16)"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3", "lfm2"])
def test_what_holds_everything_differs_in_nothing(architecture: str, method: str) -> None:
    recipe = keepset.Recipe.parse(method).with_keep(BEFORE + AFTER)
    (row,) = comparer(architecture).run(grid([recipe], [], 16))
    assert row.error is None and row.figures["keep"] == 1.0 and row.figures["top1"] == 1.0
    assert abs(row.figures["kl"]) < 1e-6 and abs(row.figures["nll_delta"]) < 1e-5
    assert row.curves["kl_drift"] == pytest.approx([0.0], abs=1e-6)


def test_one_token_is_enough_and_none_after_an_event_is_an_error() -> None:
    ids = prompt(1, BEFORE + 1)
    one = DecodeComparer(tiny("llama"), ids[:, :BEFORE], ids[:, BEFORE:], "tiny")
    recipes = keepset.Recipe.parse_list("tova(keep=9, every=4), tova(keep=9, every=1, prefill=False)")
    early, late = one.run(grid(recipes, []))
    assert early.figures["kl"] > 0 and early.figures["nll_delta"] == 0.0 and early.error is None
    assert not late.figures and "compresses nothing before the last of 1 tokens" in str(late.error)


def test_what_fails_is_a_row_and_the_others_go_on() -> None:
    recipes = keepset.Recipe.parse_list("h2o(keep=20), tova(keep=0.5), snapkv(window=5), knorm(keep=20, every=3)")
    one = comparer()
    rows = list(one.run(grid(recipes, [3, 20], 8)))
    assert [row.recipe for row in rows] == [
        "h2o(keep=20, every=8)",
        "tova(keep=0.5, every=8)",
        "snapkv(window=5, keep=3, every=8)",
        "snapkv(window=5, keep=20, every=8)",
        "knorm(keep=20, every=3)",
    ]
    says = ["looks at the attention of the whole prompt", "a fraction of what is left", "below the 5 entries"]
    for row, error in zip(rows, says, strict=False):
        assert error in str(row.error) and not row.figures
    assert [row.error for row in rows[3:]] == [None, None] and one.comparison.failed
    assert [kept is None for kept in one.comparison.kept] == [True] * 3 + [False] * 2
    assert one.comparison.to_json()["drift_tokens"] == 256


@given(st.integers(1, 300), st.none() | st.integers(1, 310))
def test_pieces_end_at_events_and_before_them(tokens: int, every: int | None) -> None:
    parts = feed_slices(tokens, every)
    assert [i for part in parts for i in range(tokens)[part]] == list(range(tokens))
    ends = {part.stop for part in parts}
    for event in range(every or tokens, tokens + 1, every or tokens):
        assert event in ends and event - 1 in ends | {0}
    assert all(0 < part.stop - part.start <= SLACK for part in parts)


def test_greedy_is_what_generate_says() -> None:
    ids, seen = prompt(1, BEFORE), []
    model = tiny("llama")
    expected = full(model, ids, max_new_tokens=20, min_new_tokens=20).sequences[0, BEFORE:].tolist()
    said, seconds = greedy(model, DynamicCache(config=model.config), ids, 20, lambda: seen.append(1))
    assert said == expected and len(seen) == 20 and seconds > 0
