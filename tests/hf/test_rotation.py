"""Queries at other positions: of models that rotate or scale them in ways of their own, and after an image."""

from __future__ import annotations

import copy
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import keepset
from keepset.core.features.attention import PromptQueryAttention
from keepset.core.features.moments import QueryMoments
from keepset.core.observation import Observation
from tests.hf.models import generate, hidden_states, oracle_gap, prompt, refusal, rotated, statistics, tiny
from tests.hf.test_refusals import random_model

LENGTH = 30
RECIPES = {
    "reread": "reread(keep=12)",
    "glance": "glance(keep=12)",
    "prompt_queries": "prompt_queries(keep=12)",
    "match": "match(snapkv(window=4), keep=12)",
    "gvote": "gvote(future=16, p_nuc=0.7)",
    "expected_attention": "adakv(expected_attention(future=16), keep=12)",
}


@pytest.mark.few(8)
@pytest.mark.parametrize("architecture", ["gemma4", "ministral3", "phi"])
@pytest.mark.parametrize("name", RECIPES)
def test_what_stays_is_attended_as_under_a_mask(architecture: str, name: str) -> None:
    model, ids = tiny(architecture), prompt(2, LENGTH)
    past = keepset.Cache(model, RECIPES[name])
    output = generate(model, ids, past, max_new_tokens=4)
    assert past.keep_set.entries < 2 * LENGTH * sum(layer.store.kv_heads for layer in past.managed_layers.values())
    assert oracle_gap(model, past, output, torch.ones_like(ids)) < 1e-3


def test_a_rotation_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")
    module = sys.modules[type(model).__module__]
    rotate = module.apply_rotary_pos_emb

    def bent(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = rotate(q, k, cos, sin)
        return q + sin.square()[:, None], k

    monkeypatch.setattr(module, "apply_rotary_pos_emb", bent)
    past = keepset.Cache(model, "expected_attention(keep=12)")
    with refusal("makes its queries in a way that keepset cannot undo"):
        generate(model, prompt(1, LENGTH), past, max_new_tokens=2)


# --- images


@cache
def seeing_model() -> Any:
    """A tiny random Qwen2.5-VL; token 150 stands for a part of an image."""
    text = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=200,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, mrope_section=[2, 3, 3]),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    vision = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=64, patch_size=2)
    special = dict(image_token_id=150, video_token_id=151, vision_start_token_id=152, vision_end_token_id=153)
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 0.15 * noise if parameter.ndim > 1 else parameter.data + 0.2 * noise
    return model


def with_image() -> dict[str, Tensor]:
    """Five tokens, an image of four by six parts, and nine tokens."""
    ids = prompt(1, 16) % 140 + 3
    image = torch.tensor([[152, *[150] * 24, 153]])
    ids = torch.cat([ids[:, :5], image, ids[:, 5:14]], 1)
    patches = torch.randn(8 * 12, 3 * 2 * 2 * 2, generator=torch.Generator().manual_seed(0))
    grid = torch.tensor([[1, 8, 12]])
    kinds = (ids == 150).int()
    return dict(input_ids=ids, pixel_values=patches, image_grid_thw=grid, mm_token_type_ids=kinds)


NEXT = 5 + 1 + 6 + 1 + 9
"""The next token's position: an image takes as many as its longer side."""


@torch.no_grad()
def test_the_prompts_queries_come_again_after_an_image() -> None:
    model, inputs, seen = seeing_model(), with_image(), {}
    length, decoder = inputs["input_ids"].shape[1], model.model.language_model

    def observe(observation: Observation, budget: Any, keep_set: Any) -> None:
        seen[observation.layer] = observation

    model.set_attn_implementation("sdpa")
    with hidden_states(decoder) as hidden:
        full = model(**inputs, use_cache=True).past_key_values
    for recipe in ("prompt_queries(stride=1, second_pass=False, keep=12)", "expected_attention(skip=0, keep=12)"):
        model(**inputs, past_key_values=keepset.Cache(model, recipe, observer=observe))
        for index, layer in enumerate(decoder.layers):
            module, keys = layer.self_attn, full.layers[index].keys[0]
            queries = module.q_proj(hidden[index]).unflatten(-1, (4, 16)).transpose(0, 1)
            turned = rotated(module, decoder.rotary_emb, queries, NEXT)
            if "prompt_queries" in recipe:
                weights = (turned @ keys.repeat_interleave(2, 0).transpose(1, 2) / 4).softmax(-1)
                theirs = weights.square().mean(1)
                ours = seen[index][PromptQueryAttention(1)][0]
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
            else:
                mean, _ = seen[index][QueryMoments(0)].ahead(1)
                torch.testing.assert_close(mean[0], turned.mean(1), rtol=1e-3, atol=1e-5)
    assert length - NEXT == 18


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["reread(keep=1.0)", "glance(keep=1.0)"])
def test_a_second_pass_after_an_image_begins_at_the_next_position(recipe: str) -> None:
    model, inputs, begun = seeing_model(), with_image(), []
    decoder = model.model.language_model
    model.set_attn_implementation("sdpa")
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    past = keepset.Cache(model, recipe)
    hook = decoder.rotary_emb.register_forward_pre_hook(lambda module, args: begun.append(int(args[1].min())))
    said = model.generate(**inputs, past_key_values=past, max_new_tokens=5, do_sample=False)
    hook.remove()
    assert torch.equal(said, expected)
    assert set(begun) == {0, *range(NEXT, NEXT + 4)}


@pytest.mark.parametrize("recipe", ["gvote", "triattention(stats={!r}, keep=10)", "qfilter(stats={!r}, keep=10)"])
def test_what_inference_mode_found_serves_after_it(recipe: str, tmp_path: Path) -> None:
    """How a module rotates, and a file's statistics, are found once, in whatever mode the first call is."""
    model, ids = copy.deepcopy(tiny("llama")), prompt(1, 30)
    file = shutil.copy(statistics("llama"), tmp_path / "stats")
    with torch.inference_mode():
        model(ids, past_key_values=keepset.Cache(model, recipe.format(str(file))))
    past = keepset.Cache(model, recipe.format(str(file)))
    model(ids, past_key_values=past)
    assert past.keep_set is not None
