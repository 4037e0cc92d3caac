"""GVote with real models: what stays is Algorithm 1 of their own hidden states, weights and rotations."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import keepset
from keepset.methods.positions import normal, stream
from tests.hf.models import full, generate, hidden_states, kept_of, oracle_gap, padded_prompt, prompt, tiny
from tests.methods.test_gvote import needed

LENGTH, PADDING, NEW = 40, [0, 7, 13], 6
RECIPE = "gvote(p_nuc=0.6, samples=3, future=16)"

of_models = pytest.mark.parametrize("architecture", ["llama", "llama_mqa", "llama_odd_head", "qwen3", "gpt2"])


def compressed(architecture: str, text: str, ids: Tensor, mask: Tensor | None = None) -> tuple[keepset.Cache, Any]:
    cache = keepset.Cache(tiny(architecture), text)
    return cache, generate(tiny(architecture), ids, cache, mask, max_new_tokens=NEW)


@of_models
def test_what_it_drops_is_as_if_masked_and_all_attention_changes_nothing(architecture: str) -> None:
    ids, mask = padded_prompt(PADDING, LENGTH)
    cache, output = compressed(architecture, RECIPE, ids, mask)
    assert oracle_gap(tiny(architecture), cache, output, mask) < 5e-5
    counts, lengths = cache.keep_set.counts, torch.tensor([LENGTH - pad for pad in PADDING])
    assert (counts >= 1).all() and (counts <= lengths[:, None]).all() and (counts < lengths[:, None]).any()
    assert cache.keep_set.layout == ("head-ragged" if counts.shape[-1] > 1 else "layer-ragged")
    _, output = compressed(architecture, "gvote(p_nuc=1.0)", ids, mask)
    assert torch.equal(output.sequences, full(tiny(architecture), ids, mask, max_new_tokens=NEW).sequences)


@torch.no_grad()
def algorithm_1(architecture: str, ids: Tensor) -> dict[int, list[list[int]]]:
    """From the model's own modules, with p_nuc=0.6, 3 samples, 16 future positions and 4 sinks."""
    model = tiny(architecture)
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    with hidden_states(model) as entering:
        attentions = model(ids, output_attentions=True, past_key_values=cache).attentions
    length = ids.shape[1]
    cos, sin = model.model.rotary_emb(ids.float(), torch.arange(length, length + 16)[None])
    rotate = importlib.import_module(type(model).__module__).apply_rotary_pos_emb
    union = {}
    for layer, ((hidden,),) in entering.items():
        module, keys = model.model.layers[layer].self_attn, cache.layers[layer].keys[0]
        mean, spread = hidden[4:].mean(0), hidden[4:].std(0, correction=0)
        sampled = mean + spread * normal(stream(0, layer, torch.arange(3)), len(mean))
        queries = module.q_proj(sampled).view(3, -1, module.head_dim)
        queries = (module.q_norm(queries) if hasattr(module, "q_norm") else queries).transpose(0, 1)
        # The mean of the rotated is what rotating with the mean gives.
        separate = [rotate(queries[None], queries[None], cos[:, i : i + 1], sin[:, i : i + 1])[0][0] for i in range(16)]
        queries, group = torch.stack(separate).mean(0), len(queries) // len(keys)
        union[layer] = [
            sorted(
                {
                    entry
                    for query_head in range(head * group, head * group + group)
                    for query in queries[query_head]
                    for entry in (keys[head] @ query)
                    .topk(needed(attentions[layer][0, query_head, -1].tolist(), 0.6))
                    .indices.tolist()
                }
            )
            for head in range(len(keys))
        ]
    return union


@pytest.mark.parametrize("architecture", ["llama", "llama_mha", "llama_mqa", "qwen3"])
def test_is_algorithm_1_of_the_model(architecture: str) -> None:
    ids = prompt(1, LENGTH)
    cache, _ = compressed(architecture, RECIPE, ids)
    assert kept_of(cache.keep_set) == algorithm_1(architecture, ids)
