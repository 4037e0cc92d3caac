"""Waits for a GPU: decoding makes the host wait for nothing, an event once, for its counts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import keepset
from keepset.errors import KeepsetError
from tests.hf.models import ARCHITECTURES, padded_prompt, prompt, recipe, tiny

pytest.importorskip("triton")
from tests.posing import Gpu, Posing, on_gpu

LENGTH, EVERY = 20, 4
COMPOSED = ["match(pool(knorm), keep=12)", "int8(match(knorm), keep=12)", "adakv(pyramid(knorm), keep=12)"]
COMPOSED += ["quantized(adakv(knorm), bits=4, keep=12)"]
QUICK = ["knorm", "snapkv", "h2o", "expected_attention", "second_pass", "gvote", "adakv", "ams"]
"""Of everything that is looked at, and of every layout, one; the full tier has all methods."""

BESIDES = {"quantized": 4, "match": 4}
"""What a layer launches besides for each decoded token: queries, keys, values and the output are mixed; queries that an
event will see once more are recorded with their rotation."""


def step(model: Any, cache: Any, tokens: Tensor) -> None:
    model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)


@pytest.fixture(scope="module")
def usual() -> tuple[Any, int]:
    """A model of one layer on the GPU, and what a decoded token launches with transformers' own cache."""
    with pytest.MonkeyPatch.context() as patch, Gpu(patch, computes=False) as gpu, torch.no_grad():
        model = on_gpu(copy.deepcopy(tiny("llama_shallow")))
        tokens = Posing(prompt(2, LENGTH))
        model.set_attn_implementation("sdpa")
        plain = DynamicCache(config=model.config)
        step(model, plain, tokens[:, :-1])
        gpu.reset()
        step(model, plain, tokens[:, -1:])
        launches = gpu.launches.total()
        # A model's first event compares its rotation with keepset's.
        step(model, keepset.Cache(model, recipe("expected_attention", 12)), tokens)
    return model, launches


@pytest.mark.parametrize(
    "method", [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in keepset.METHODS if name not in QUICK)]
)
def test_waits_and_launches(
    triton_interpreted: None, method: str, usual: tuple[Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, launches), ids = usual, prompt(2, LENGTH)
    layers = model.config.num_hidden_layers
    with Gpu(monkeypatch, computes=False) as gpu, torch.no_grad():
        tokens = Posing(ids)
        try:
            cache = keepset.Cache(model, f"{recipe(method, 12)[:-1]}, every={EVERY})")
        except KeepsetError:  # at the prompt's end only
            cache = keepset.Cache(model, recipe(method, 12))
        step(model, cache, tokens)
        of_event = gpu.waits.copy()
        step(model, cache, tokens[:, :1])  # makes room for tokens
        for _ in range(EVERY - 2):
            gpu.reset()
            step(model, cache, tokens[:, :1])
            assert not gpu.waits
        assert gpu.launches.total() <= launches + (3 + BESIDES.get(method, 0)) * layers, gpu.launches
        assert of_event.total() <= 1 + more_waits(method, layers, len(ids)), of_event


def more_waits(method: str, layers: int, requests: int) -> int:
    """For what else an event waits at a prompt's end, beside once for the counts of all layers."""
    return {"kvzip": requests, "gvote": layers - 1}.get(method, 0)


FEW = [(2, "adakv", False), (2, "pool", True)]
MANY = [(3, method, False) for method in (*keepset.METHODS, *COMPOSED)]
MANY += [(8, method, False) for method in ("snapkv", "adakv", "ams")]
MANY += [(2, method, True) for method in ("knorm", "pyramid", "ams", "gvote")]


@pytest.mark.parametrize(
    "layers,method,padded", [*FEW, *(pytest.param(*case, marks=pytest.mark.full) for case in MANY)]
)
def test_an_event_waits_once_for_all_layers(
    triton_interpreted: None, layers: int, method: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the prompt's end and while decoding; a model's first look at its rotations is not counted."""
    monkeypatch.setitem(ARCHITECTURES, f"llama_{layers}_layers", ("llama", {"num_hidden_layers": layers}))
    model, (ids, mask) = copy.deepcopy(tiny(f"llama_{layers}_layers")), padded_prompt([0, 7], LENGTH)
    text, every = method if "(" in method else recipe(method, 12), 2
    with Gpu(monkeypatch, computes=padded) as gpu, torch.no_grad():
        on_gpu(model)
        tokens = Posing(ids)
        if keepset.Recipe.parse(text).method.traits.needs.unrotated:
            step(model, keepset.Cache(model, recipe("expected_attention", 12)), tokens)
        try:
            cache = keepset.Cache(model, f"{text[:-1]}, every={every})")
        except KeepsetError:  # at the prompt's end only
            cache, every = keepset.Cache(model, text), 0
        gpu.reset()
        attention_mask = Posing(mask) if padded else None
        model(tokens, attention_mask=attention_mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
        files = "hf/attention.py", "hf/second_pass.py"
        looked = [gpu.waits[where] for where in gpu.waits if any(file in where for file in files)]
        assert gpu.waits.total() - sum(looked) <= 1 + more_waits(method, layers, len(ids)), gpu.waits
        for _ in range(every):
            gpu.reset()
            step(model, cache, tokens[:, :1])
        assert not every or (gpu.waits.total() == 1 and len(cache.events) == 2), gpu.waits


@pytest.mark.parametrize(
    "method",
    [
        "adakv",
        *(pytest.param(name, marks=pytest.mark.full) for name in keepset.METHODS if name not in ("adakv", "kvzip")),
    ],
)
def test_a_padded_prompt_is_looked_at_once(
    triton_interpreted: None, method: str, usual: tuple[Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all layers, beside what transformers' own mask asks of it; what its event waits for is that of any prompt."""
    (model, _), (ids, mask) = usual, padded_prompt([0, 7], LENGTH)
    waits = []
    with Gpu(monkeypatch) as gpu, torch.no_grad():
        for padding in (None, Posing(mask)):
            cache = keepset.Cache(model, recipe(method, 12))
            gpu.reset()
            model(Posing(ids), attention_mask=padding, past_key_values=cache, use_cache=True, logits_to_keep=1)
            waits.append(gpu.waits.copy())
    plain, padded = waits
    additional = padded - plain
    of_pass = sum(waits for where, waits in additional.items() if "hf/second_pass.py" in where)
    of_mask = sum(waits for where, waits in additional.items() if "hf/attention.py" in where)
    assert of_mask <= 3 and of_pass <= len(ids) and of_mask + of_pass == additional.total(), additional


def test_padded_batches_of_ragged_heads(triton_interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoded token takes no more launches than under transformers' own cache, and both look at the mask once."""
    model, (ids, mask) = copy.deepcopy(tiny("llama")), padded_prompt([0, 7], LENGTH)
    counted = []
    with Gpu(monkeypatch, computes=False) as gpu, torch.no_grad():
        on_gpu(model)
        for text in (None, "adakv(knorm, keep=7)"):
            model.set_attn_implementation("sdpa")
            cache = DynamicCache(config=model.config) if text is None else keepset.Cache(model, text)
            for first, last in ((0, LENGTH - 2), (LENGTH - 2, LENGTH - 1), (LENGTH - 1, LENGTH)):
                gpu.reset()
                new, so_far = Posing(ids[:, first:last]), Posing(mask[:, :last])
                model(new, past_key_values=cache, attention_mask=so_far, use_cache=True, logits_to_keep=1)
            counted.append((gpu.launches.total(), gpu.waits.total()))
    (usual, looks), (ours, our_looks) = counted
    assert ours <= usual and our_looks == looks == 1, counted
