"""Queries at other positions: of models that rotate or scale them in ways of their own, and after an image."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset.core.features.attention import PromptQueryAttention
from keepset.core.features.moments import QueryMoments
from keepset.core.observation import Observation
from tests.hf.models import generate, hidden_states, prompt, refusal, rotated, statistics, tiny, untrained
from tests.hf.pictures import seeing

LENGTH, KIND = 30, "qwen2_5_vl"


def test_a_rotation_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained("llama")
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


def with_image() -> dict[str, Tensor]:
    """Five tokens, an image of four by six parts, and nine tokens."""
    config = seeing(KIND).config
    ids = prompt(1, 14) % 100 + 20
    ids = torch.cat([ids[:, :5], torch.full((1, 24), config.image_token_id), ids[:, 5:]], 1)
    numbers = config.vision_config.in_channels * config.vision_config.temporal_patch_size * 8 * 8
    patches = torch.randn(8 * 12, numbers, generator=torch.Generator().manual_seed(0))
    kinds = (ids == config.image_token_id).int()
    grid = torch.tensor([[1, 8, 12]])
    return dict(input_ids=ids, pixel_values=patches, image_grid_thw=grid, mm_token_type_ids=kinds)


NEXT = 5 + 6 + 9
"""The next token's position: an image takes as many as its longer side."""


@torch.no_grad()
def test_the_prompts_queries_come_again_after_an_image() -> None:
    model, inputs, observations = seeing(KIND), with_image(), {}
    length, decoder = inputs["input_ids"].shape[1], model.model.language_model

    def observe(observation: Observation, budget: Any, keep_set: Any) -> None:
        observations[observation.layer] = observation

    model.set_attn_implementation("sdpa")
    with hidden_states(decoder) as hidden:
        full = model(**inputs, use_cache=True).past_key_values
    for recipe in ("prompt_queries(stride=1, second_pass=False, keep=12)", "expected_attention(skip=0, keep=12)"):
        model(**inputs, past_key_values=keepset.Cache(model, recipe, observer=observe))
        for index, layer in enumerate(decoder.layers):
            module, keys = layer.self_attn, full.layers[index].keys[0]
            queries = module.q_proj(hidden[index][0][0]).unflatten(-1, (4, 16)).transpose(0, 1)
            turned = rotated(module, decoder.rotary_emb, queries, NEXT)
            if "prompt_queries" in recipe:
                weights = (turned @ keys.repeat_interleave(2, 0).transpose(1, 2) / 4).softmax(-1)
                right = weights.square().mean(1)
                ours = observations[index][PromptQueryAttention(1)][0]
                torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-6)
            else:
                mean, _ = observations[index][QueryMoments(0)].ahead(1)
                torch.testing.assert_close(mean[0], turned.mean(1), rtol=1e-3, atol=1e-5)
    assert length - NEXT == 18


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


def spoil(weight: Tensor, kind: str, size: int) -> None:
    """Make channels of every head's queries dead, equal or huge: rows of a projection, `[heads * size, hidden]`."""
    rows = weight.data.view(-1, size, weight.shape[1])
    match kind:
        case "dead":
            rows[:, [2, size // 2 + 1]] = 0
        case "dead pair":
            rows[:, [0, 1, size // 2, size // 2 + 1]] = 0
        case "dead head":
            rows[0] = 0
        case "equal":
            rows[:, 1:4], rows[:, size - 2 :] = rows[:, :1], -rows[:, 4:5]
        case "equal pairs":
            rows[:, : size // 2], rows[:, size // 2 :] = rows[:, :1], rows[:, -1:]
        case "huge":
            rows[:, 3] *= 300


@pytest.mark.cross
@pytest.mark.parametrize("kind", ["dead", "dead pair", "dead head", "equal", "equal pairs", "huge"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "cohere", "llama_yarn", "ministral3", "smollm3"])
@torch.no_grad()
def test_channels_that_are_dead_equal_or_huge(architecture: str, kind: str) -> None:
    """Random weights never have them, and real models do: a norm's scale of Gemma 3 is exactly 0 in one channel."""
    model, observations, ids = copy.deepcopy(tiny(architecture)), {}, prompt(1, LENGTH)
    for layer in model.model.layers:
        spoil(layer.self_attn.q_proj.weight, kind, layer.self_attn.head_dim)

    def observe(observation: Observation, budget: Any, keep_set: Any) -> None:
        observations[observation.layer] = observation

    past = keepset.Cache(model, "expected_attention(skip=0, keep=12)", observer=observe)
    with hidden_states(model) as hidden:
        model(ids, past_key_values=past)
    for index, layer in enumerate(model.model.layers):
        module = layer.self_attn
        queries = module.q_proj(hidden[index][0][0]).unflatten(-1, (-1, module.head_dim))
        if hasattr(module, "q_norm"):
            queries = module.q_norm(queries)
        turned = rotated(module, model.model.rotary_emb, queries.transpose(0, 1), LENGTH)
        mean, _ = observations[index][QueryMoments(0)].ahead(1)
        scale = float(turned.abs().max())
        torch.testing.assert_close(mean[0], turned.mean(1), rtol=1e-3, atol=1e-5 * scale)
