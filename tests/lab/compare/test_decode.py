"""Figures of decoding against a loop that feeds one token after another."""

from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

import keepset
from keepset.core.budget import Budget
from keepset.kernels.packed import SLACK
from keepset.lab.candidate import grid
from keepset.lab.compare import decode
from keepset.lab.compare.decode import DecodeComparer, feed_slices
from tests.hf.contract.builds import build
from tests.hf.models import prompt, tiny
from tests.lab.compare.test_prompt import best, divergence
from tests.tiers import FULL

BEFORE, AFTER = 40, 75 if FULL else 43
IDS = prompt(1, BEFORE + AFTER)
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


class Naive(NamedTuple):
    """One token at a time: log-probabilities, bytes and what is held of tokens after each, and events so far."""

    steps: list[list[float]]
    nbytes: list[int]
    recorded: int
    events: list[int]
    held: list[float]


@torch.no_grad()
def naive(cache: Any) -> Naive:
    model = tiny("llama")
    model(IDS[:, :BEFORE], past_key_values=cache)
    steps, nbytes, recorded, held = [], [], 0, []
    for token in IDS[0, BEFORE:]:
        logits = model(token[None, None], past_key_values=cache).logits[0, -1]
        steps.append(logits.double().log_softmax(-1).tolist())
        if isinstance(cache, keepset.Cache):
            nbytes.append(cache.nbytes)
            held.append(cache.share * (BEFORE + len(steps)))
            windows = [layer.collector.nbytes for layer in cache.layers]
            stores = [layer.store.packed for layer in cache.layers]
            sums = [column.nbytes for store in stores for name, column in store.items() if name.startswith("received")]
            recorded = max(recorded, sum(windows) + sum(sums))
        else:
            nbytes.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))
    return Naive(steps, nbytes, recorded, [event.length for event in getattr(cache, "events", [])], held)


@pytest.fixture(scope="module")
def expected() -> Naive:
    """The same of transformers' own cache and attention."""
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    return naive(DynamicCache(config=model.config))


def comparer(architecture: str = "llama", after: int = AFTER) -> DecodeComparer:
    return DecodeComparer(tiny(architecture), IDS[:, :BEFORE], IDS[:, BEFORE : BEFORE + after], architecture)


@pytest.mark.few(2)
@pytest.mark.parametrize("text", RECIPES)
def test_figures_are_those_of_one_token_at_a_time(text: str, expected: Naive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "DRIFT_TOKENS", 32)
    cache, ids = keepset.Cache(tiny("llama"), text), IDS[0].tolist()
    ours, one = naive(cache), comparer()
    (row,) = one.run(grid([keepset.Recipe.parse(text)], []))
    assert row.error is None

    pairs = list(zip(expected.steps, ours.steps, strict=True))
    kl, first = [divergence(a, b) for a, b in pairs], ours.events[0] - BEFORE
    assert row.figures["kl"] == pytest.approx(fmean(kl[first:]), rel=1e-3, abs=1e-6)
    assert row.figures["kl"] > 1e-3
    drift = [fmean(kl[i : i + 32]) for i in range(0, AFTER, 32)]
    assert row.curves["kl_drift"] == pytest.approx(drift, rel=1e-3, abs=1e-6)
    deltas = [a[token] - b[token] for (a, b), token in zip(pairs, ids[BEFORE + 1 :], strict=False)]
    assert row.figures["nll_delta"] == pytest.approx(fmean(deltas[first:]), abs=1e-4)
    assert row.figures["top1"] == pytest.approx(fmean(best(a) == best(b) for a, b in pairs[first:]))
    # Queries for the next event come one after another; a piece is counted with all that it recorded.
    exact = round(fmean(ours.nbytes[first:]))
    assert exact <= row.figures["kv_bytes"] <= exact + ours.recorded
    assert row.figures["kv_bytes_peak"] == max(ours.nbytes[first:])
    pieces = feed_slices(AFTER, cache.schedule.every)
    held = [ours.held[part.stop - 1] for part in pieces for _ in range(part.start, part.stop)]
    lengths = [BEFORE + token for token in range(first + 1, AFTER + 1)]
    assert row.figures["share"] == pytest.approx(fmean(held[first:]) / fmean(lengths))
    assert row.figures["kv_bytes_full"] == round(fmean(expected.nbytes[first:]))

    (kept,) = one.comparison.kept
    assert kept is not None and cache.keep_set is not None and kept.shape == (2, 2, BEFORE + AFTER)
    for layer in range(2):
        for head in range(2):
            held = [*cache.keep_set.positions(layer, 0, head).tolist(), *range(ours.events[-1], BEFORE + AFTER)]
            assert kept[layer, head].nonzero()[:, 0].tolist() == held
    assert row.figures["keep"] == pytest.approx(float(kept.float().mean()))


def test_the_full_cache_and_one_token(expected: Naive) -> None:
    figures = comparer().comparison.full
    assert figures["kv_bytes"] == round(fmean(expected.nbytes)) and figures["kv_bytes_peak"] == max(expected.nbytes)
    nll = [-step[token] for step, token in zip(expected.steps, IDS[0, BEFORE + 1 :].tolist(), strict=False)]
    assert figures["nll"] == pytest.approx(fmean(nll), abs=1e-5)
    assert figures["prefill_seconds"] > 0 and figures["decode_tokens_per_second"] > 0
    recipes = keepset.Recipe.parse_list("tova(keep=9, every=4), tova(keep=9, every=1, prefill=False)")
    early, late = comparer(after=1).run(grid(recipes, []))
    assert early.figures["kl"] > 0 and early.figures["nll_delta"] == 0.0 and early.error is None
    assert not late.figures and "compresses nothing before the last of 1 tokens" in str(late.error)


@pytest.mark.few(2)
@pytest.mark.cross
@pytest.mark.parametrize("method", ["tova", "adakv(snapkv(window=5))", "expected_attention(future=16)"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3", "lfm2"])
def test_what_holds_everything_differs_in_nothing(architecture: str, method: str) -> None:
    recipe = keepset.Recipe.parse(method).with_budget(keep=BEFORE + AFTER)
    (row,) = comparer(architecture).run(grid([recipe], [], 16))
    assert row.error is None and row.figures["keep"] == 1.0 and row.figures["top1"] == 1.0
    assert abs(row.figures["kl"]) < 1e-6 and abs(row.figures["nll_delta"]) < 1e-5
    assert row.curves["kl_drift"] == pytest.approx([0.0], abs=1e-6)


def test_what_fails_is_a_row_and_the_others_go_on() -> None:
    recipes = keepset.Recipe.parse_list("h2o(keep=20), tova(keep=0.5), snapkv(window=5), knorm(keep=20, every=3)")
    one = comparer()
    rows = list(one.run(grid(recipes, [Budget(3), Budget(20)], 8)))
    says = {
        "h2o(keep=20, every=8)": "looks at the attention of the whole prompt",
        "tova(keep=0.5, every=8)": "a share of what is left",
        "snapkv(window=5, keep=3, every=8)": "below the 5 entries",
        "snapkv(window=5, keep=20, every=8)": "",
        "knorm(keep=20, every=3)": "",
    }
    for row, (recipe, error), kept in zip(rows, says.items(), one.comparison.kept, strict=True):
        assert row.recipe == recipe and error in (row.error or "")
        assert bool(row.error) == bool(error) == (kept is None) == (not row.figures)
    assert one.comparison.failed and one.comparison.to_json()["drift_tokens"] == 256


@given(st.integers(1, 300), st.none() | st.integers(1, 310))
def test_pieces_end_at_events_and_before_them(tokens: int, every: int | None) -> None:
    parts = feed_slices(tokens, every)
    assert [i for part in parts for i in range(tokens)[part]] == list(range(tokens))
    ends = {part.stop for part in parts}
    for event in range(every or tokens, tokens + 1, every or tokens):
        assert event in ends and event - 1 in ends | {0}
    assert all(0 < part.stop - part.start <= SLACK for part in parts)


def test_the_full_cache_of_states_is_that_of_one_token_at_a_time() -> None:
    """Of a model whose mixers forget their states before several tokens."""
    model = build("jamba")
    comparer = DecodeComparer(model, IDS[:, :BEFORE], IDS[:, BEFORE : BEFORE + 20], "jamba")
    with torch.no_grad():
        expected = model(IDS[:, : BEFORE + 20], use_cache=False).logits[0, BEFORE:]
    assert torch.allclose(comparer._full.logits, expected, atol=1e-3)
