"""What a GPU would be asked for: decoding makes the host wait for nothing, an event once a layer, for its counts."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import keepset
from keepset.errors import KeepsetError
from tests.hf.models import prompt, recipe, tiny

pytest.importorskip("triton")
from tests.posing import Gpu, Posing, on_gpu

LENGTH, EVERY = 20, 4


@pytest.mark.parametrize("method", keepset.METHODS)
def test_waits_and_launches(triton_interpreted: None, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = copy.deepcopy(tiny("llama")), prompt(2, LENGTH)
    layers = model.config.num_hidden_layers
    with Gpu(monkeypatch) as gpu, torch.no_grad():
        on_gpu(model)
        tokens = Posing(ids)

        def step(cache: object, first: int, last: int) -> None:
            gpu.reset()
            model(tokens[:, first:last], past_key_values=cache, use_cache=True, logits_to_keep=1)

        model.set_attn_implementation("sdpa")
        plain = DynamicCache(config=model.config)
        step(plain, 0, LENGTH - 1)
        step(plain, LENGTH - 1, LENGTH)
        usual = gpu.launches.total()

        # A model's first event compares its rotation with keepset's.
        step(keepset.Cache(model, recipe(method, 12)), 0, LENGTH)
        try:
            cache = keepset.Cache(model, f"{recipe(method, 12)[:-1]}, every={EVERY})")
        except KeepsetError:  # at the prompt's end only
            cache = keepset.Cache(model, recipe(method, 12))
        step(cache, 0, LENGTH)
        of_event = gpu.waits.copy()
        step(cache, 0, 1)  # makes room for tokens
        for _ in range(EVERY - 2):
            step(cache, 0, 1)
            assert not gpu.waits
        if cache.schedule.every is None or not cache.recipe.method.needs.window:
            assert gpu.launches.total() <= usual + 3 * layers
        # KVzip looks for the chat template's opening in each prompt, CompilerKV for the longest of all.
        more = {"kvzip": len(ids), "compilerkv": 1}.get(method, 0)
        assert of_event.total() <= layers + more, of_event
