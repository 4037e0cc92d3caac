"""Caches that go on side by side, against each of them going on alone."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset.core.keep_set import KeepSet
from keepset.errors import KeepsetError
from keepset.hf.batch import can_go_together, go_together
from tests.hf.models import prompt, same_keep_set, tiny
from tests.kernels.interpreter import on_operators
from tests.on_gpu import pretends

SEGMENTS = "window=6, kernel=3, segment_mass=0.2, min_segment=2, max_segment=6"
RECIPES = {
    "full": "streaming_llm(keep=1.0)",
    "gvote": "gvote",
    "prompt_only": "adakv(snapkv(window=4), keep=0.3)",
    "snapkv": "snapkv(window=4, keep=9, every=5)",
    "adakv": "adakv(snapkv(window=4), keep=9, every=4)",
    "pyramid": "pyramid(snapkv(window=4), keep=8, every=6)",
    "ams": f"ams(tova, {SEGMENTS}, keep=14, sinks=2, recent=3, every=4)",
    "r_kv": "r_kv(window=3, kernel=3, keep=9, every=5)",
    "expected_attention": "expected_attention(future=8, skip=2, buffer=7, keep=8, every=5)",
    "random": "random(keep=9, recent=2, every=1, protect_prompt=True)",
    "h2o": "h2o(keep=10)",
    "tova": "tova(keep=7, every=1, prefill=False)",
    "across_layers": "kvcompose(keep=0.4)",
    "pool": "pool(knorm, keep=8, every=3)",
}
LENGTHS = [21, 1, 9, 30, 8, 16]
"""Of prompts: one of a single token, and of as many as some recipes keep; some reach an event at the same step."""
MODELS = ["llama", "bfloat16", "llama_mqa", "llama_odd_head", "qwen3", "gpt2"]


@functools.cache
def model_of(name: str) -> Any:
    return copy.deepcopy(tiny("llama")).bfloat16() if name == "bfloat16" else tiny(name)


@torch.no_grad()
def begun(model: Any, recipe: str, length: int) -> keepset.Cache:
    cache = keepset.Cache(model, recipe, history=True)
    model(prompt(1, length, seed=length), past_key_values=cache)
    return cache


@torch.no_grad()
def said(model: Any, cache: keepset.Cache, tokens: Tensor) -> Tensor:
    return model(tokens, past_key_values=cache).logits[:, -1].float()


def same(ours: keepset.Cache, alone: keepset.Cache) -> None:
    """Check that two caches hold the same entries after the same events, and as many bytes."""
    assert ours.get_seq_length() == alone.get_seq_length() and ours.nbytes == alone.nbytes
    assert [event.length for event in ours.events] == [event.length for event in alone.events]
    for event, right in zip(ours.events, alone.events, strict=True):
        assert isinstance(event.keep_set, KeepSet) and isinstance(right.keep_set, KeepSet)
        assert same_keep_set(event.keep_set, right.keep_set)


@contextmanager
def plainly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run on PyTorch's operators."""
    with monkeypatch.context() as patch:
        on_operators(patch)
        yield


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("implementation", "architecture"),
    [*(("pytorch", name) for name in MODELS), pytest.param("triton", "llama", marks=pytest.mark.full)],
    indirect=["implementation"],
)
@torch.no_grad()
def test_rows_of_any_recipes_and_lengths_go_on_as_each_would_alone(
    implementation: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone on PyTorch's operators, whichever kernels the batch has. Walks have rows of one recipe."""
    model, half, steps = model_of(architecture), architecture == "bfloat16", 8 if implementation == "pytorch" else 2
    names = RECIPES if steps == 8 else ["full", "snapkv", "adakv", "pyramid", "ams", "random"]
    names = [name for name in names if architecture != "gpt2" or name not in ("expected_attention", "gvote")]
    rows, spread = list(zip(names, itertools.cycle(LENGTHS), strict=False)), 0.0

    def made() -> tuple[keepset.Cache, keepset.Cache]:
        name, length = rows.pop(0)
        with plainly(monkeypatch):
            alone = begun(model, RECIPES[name], length)
        return begun(model, RECIPES[name], length), alone

    pairs = [made() for _ in range(len(rows) - (steps == 8) * 2)]
    for at in range(steps):
        if at == 3:  # one leaves, and two join
            pairs = [*pairs[:2], *pairs[3:], made(), made()]
        tokens = prompt(len(pairs), 3 if at == 6 else 1, seed=at)
        together, errors = go_together(model, [ours for ours, _ in pairs], tokens)
        assert errors == {}
        for row, (ours, alone) in enumerate(pairs):
            with plainly(monkeypatch):
                expected = said(model, alone, tokens[row : row + 1])[0]
            if half:  # what stays may differ where two entries are as good
                assert ours.get_seq_length() == alone.get_seq_length()
                assert [event.length for event in ours.events] == [event.length for event in alone.events]
            if not half or at < 3:
                torch.testing.assert_close(together[row].float(), expected, rtol=0.0, atol=0.15 if half else 2e-4)
            if not half:
                same(ours, alone)
        spread = max(spread, float((together[0] - together[-1]).abs().max()))
    assert spread > 0.1


@pytest.mark.full
@pretends
@torch.no_grad()
def test_launches_do_not_grow_with_rows(triton_interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the host wait for anything: rows of any lengths and layouts, on a make-believe GPU."""
    pytest.importorskip("triton")
    from tests.posing import Gpu, Posing, on_gpu

    model = copy.deepcopy(tiny("llama"))
    recipes = ["adakv(knorm, keep=5)", "pyramid(knorm, keep=4, every=100)", RECIPES["full"]]
    counted = {}
    with Gpu(monkeypatch, computes=False) as gpu:
        on_gpu(model)
        for rows in (1, 2, 5):
            caches = [keepset.Cache(model, recipes[row % 3]) for row in range(rows)]
            for row, cache in enumerate(caches):
                model(Posing(prompt(1, 6 + row, seed=row)), past_key_values=cache)
            for n in (1, 1, 2):  # the first makes room
                gpu.reset()
                go_together(model, caches, Posing(prompt(rows, n)))
                counted[rows, n] = gpu.launches.copy()
            assert not gpu.waits, gpu.waits
    for n in (1, 2):
        # Of one row alone there is nothing to join: the table is not sent again.
        layers = model.config.num_hidden_layers
        assert counted[5, n].total() == counted[2, n].total() <= counted[1, n].total() + 2 * layers, counted


@pytest.mark.parametrize("error", [KeepsetError("Not this one."), MemoryError()])
@torch.no_grad()
def test_what_goes_wrong_with_one_spoils_no_other(error: Exception) -> None:
    model, recipe = tiny("llama"), RECIPES["snapkv"]
    alone, caches = ([begun(model, recipe, length) for length in (21, 9, 16)] for _ in range(2))
    failing = caches[1].managed_layers[1]

    def fail(forward: Any) -> Any:
        raise error

    failing.attend = fail  # type: ignore[method-assign]
    tokens = prompt(3, 1)
    together, errors = go_together(model, caches, tokens)
    assert errors == {1: error}
    for row in (0, 2):
        expected = said(model, alone[row], tokens[row : row + 1])[0]
        torch.testing.assert_close(together[row], expected, atol=1e-4, rtol=0.0)
        same(caches[row], alone[row])


@torch.no_grad()
def test_another_attention_implementation_is_noticed() -> None:
    model = copy.deepcopy(tiny("llama"))
    caches = [begun(model, RECIPES["snapkv"], length) for length in (9, 7)]
    model.set_attn_implementation("sdpa")
    with pytest.raises(KeepsetError, match="is not 'keepset' any more"):
        go_together(model, caches, prompt(2, 1))


@pytest.mark.parametrize(
    ("architecture", "can"),
    [("llama", True), ("llama_yarn", True), ("gpt2", True), ("gemma3", False), ("lfm2", False), ("dynamic", False)],
)
def test_which_models_caches_can(architecture: str, can: bool) -> None:
    model = copy.deepcopy(tiny("llama" if architecture == "dynamic" else architecture))
    if architecture == "dynamic":
        model.model.rotary_emb.rope_type = "dynamic"
    assert can_go_together(model) is can
