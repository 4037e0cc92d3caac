"""Models that cache latents: entries of one KV head, chosen and moved as the model caches them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import keepset
from keepset.core.feature import Needs
from keepset.core.features.attention import AttentionColumns, SecondPass
from keepset.core.features.moments import QueryMoments
from keepset.core.features.runtime_features import OutputProjection, RecentQueries
from keepset.hf.attention import set_pending_latents
from keepset.hf.prompt_session import Recorder
from keepset.kernels.columns import ColumnStatistic
from tests.hf.contract.builds import build
from tests.hf.contract.check import masked
from tests.hf.models import PLAIN, check_copies, generate, padded_prompt, prompt, refusal, tiny

LENGTH, HEADS, LATENT, ROTATED = 36, 4, 24, 8
KINDS = "deepseek_v2", "deepseek_v3", "minicpm3"
latent = cache(build)
by_model = pytest.mark.parametrize("kind", KINDS)


@by_model
def test_its_own_tokens_if_all_stays(kind: str) -> None:
    model, ids = latent(kind), prompt(1, LENGTH)
    model.set_attn_implementation("sdpa")
    expected = generate(model, ids, DynamicCache(config=model.config), max_new_tokens=8).sequences
    for recipe in ("knorm(keep=1.0)", "adakv(snapkv(window=5), keep=99, every=3)"):
        assert torch.equal(generate(model, ids, keepset.Cache(model, recipe), max_new_tokens=8).sequences, expected)


RECIPES = [
    "h2o(keep=14)",
    "adakv(snapkv(window=5), keep=14)",
    "criticalkv(expected_attention(future=8), keep=14)",
    "prompt_queries(keep=14)",
    "pool(tova, keep=14, every=3)",
]


@pytest.mark.parametrize("implementation", ["pytorch", pytest.param("triton", marks=pytest.mark.full)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_dropped_entries_are_hidden_from_all_heads(
    recipe: str, implementation: str, request: pytest.FixtureRequest
) -> None:
    model, ids = latent("deepseek_v3"), prompt(1, LENGTH)
    if implementation == "triton":
        request.getfixturevalue("triton_interpreted")
    past = keepset.Cache(model, recipe, history=True)
    output = generate(model, ids, past, max_new_tokens=6)
    assert past.keep_set.entries == 14 * len(past.managed_layers)
    gap = torch.stack(output.logits, 1) - masked(model, past, output)
    assert gap.abs().max() < 2e-3 * max(float(output.logits[0].std()), 1.0)


@by_model
@torch.no_grad()
def test_what_methods_see_makes_the_models_own_attention(kind: str) -> None:
    """Products of queries and keys, and what the output projection makes of values, are those of every head."""
    model, ids = latent(kind), prompt(1, LENGTH)
    columns, projection, second = (
        AttentionColumns(ColumnStatistic.SUM),
        OutputProjection(),
        SecondPass(frozenset({ColumnStatistic.MAX})),
    )
    needs = Needs(RecentQueries(6), columns, projection, QueryMoments(4), second)
    seen = Recorder(model, needs).prefill(ids).observations[1]
    assert seen.keys.shape == (1, 1, LENGTH, LATENT + ROTATED) and seen.values.shape[-1] == LATENT
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    paid = eager(ids, use_cache=False, output_attentions=True).attentions[1][0]
    torch.testing.assert_close(seen.window_attention(6)[0], paid[:, -6:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen[columns][0], paid.sum(1), rtol=1e-4, atol=1e-5)
    twice = eager(torch.cat([ids, ids], 1), use_cache=False, output_attentions=True).attentions[1][0]
    received = twice[:, LENGTH:, :LENGTH].amax(1)
    torch.testing.assert_close(seen[second].statistics[ColumnStatistic.MAX][0], received, rtol=1e-3, atol=1e-5)
    # What an entry adds to the layer's output by each head.
    module, made = eager.model.layers[1].self_attn, {}
    module.register_forward_pre_hook(lambda *call: made.update(hidden=call[2]["hidden_states"]), with_kwargs=True)
    eager(ids, use_cache=False)
    cached = module.kv_a_layernorm(module.kv_a_proj_with_mqa(made["hidden"])[..., :LATENT])
    torch.testing.assert_close(seen.values[0, 0], cached[0], rtol=1e-4, atol=1e-5)
    values = module.kv_b_proj(cached[0]).unflatten(-1, (HEADS, -1))[..., -module.v_head_dim :]
    weight = module.o_proj.weight.T.unflatten(0, (HEADS, -1))
    expected = torch.einsum("nhv,hvd->hnd", values, weight)
    torch.testing.assert_close(seen.values[0] @ seen[projection], expected, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_queries_before_rotation_are_those_of_position_0() -> None:
    """Rotated to any position, their products with keys are those of the model there."""
    model, ids = latent("deepseek_v3"), prompt(1, LENGTH)
    seen = Recorder(model, Needs(QueryMoments(0), RecentQueries(1))).prefill(ids).observations[0]
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("plain")
    still = plain.model.layers[0].self_attn
    cos, sin = (torch.ones(1, LENGTH, ROTATED), torch.zeros(1, LENGTH, ROTATED))
    hidden = {}
    still.register_forward_pre_hook(lambda *call: hidden.update(call[2]), with_kwargs=True)
    plain(ids, use_cache=False)
    still.forward(**{**hidden, "position_embeddings": (cos, sin), "past_key_values": None})
    unrotated = PLAIN[0][0]
    nope = unrotated.shape[-1] - ROTATED
    up = still.kv_b_proj.weight.unflatten(0, (HEADS, -1))[:, :nope]
    expected = torch.cat([unrotated[..., :nope] @ up, unrotated[..., nope:]], -1).mean(1)
    torch.testing.assert_close(seen[QueryMoments(0)].mean[0], expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_bytes_are_those_of_latents() -> None:
    model, ids = latent("deepseek_v3"), prompt(2, LENGTH)
    past, whole = keepset.Cache(model, "knorm(keep=12)"), DynamicCache(config=model.config)
    for each in (past, whole):
        model(ids, past_key_values=each, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers)
    assert held == 2 * 2 * LENGTH * (LATENT + ROTATED) * 4 == past.nbytes_full == past.events[0].nbytes_before
    assert past.keep_set.nbytes == held * 12 // LENGTH
    positions = 2 * 2 * 12 * 4
    assert past.nbytes == past.keep_set.nbytes + positions and past.share == pytest.approx(12 / LENGTH, rel=0.2)


@pytest.mark.few
@by_model
@pytest.mark.parametrize("recipe", ["snapkv(window=5, keep=14)", "snapkv(window=5, keep=14, every=4)"])
@torch.no_grad()
def test_batches_files_forks_and_tokens_taken_back(kind: str, recipe: str, tmp_path: Path) -> None:
    model, (ids, mask) = latent(kind), padded_prompt([0, 7], LENGTH)
    past, alone = keepset.Cache(model, recipe), keepset.Cache(model, recipe)
    model(ids, attention_mask=mask, past_key_values=past, use_cache=True)
    model(ids[1:, 7:], past_key_values=alone, use_cache=True)
    assert past.keep_set.positions(1, 1, 0).tolist() == alone.keep_set.positions(1, 0, 0).tolist()
    gone_on, questions = past.fork(), prompt(2, 3, seed=1)
    expected = model.generate(**past.ask(questions), max_new_tokens=5, do_sample=False, pad_token_id=0)
    gone_on.save(tmp_path / "context")
    loaded = keepset.Cache.load(tmp_path / "context", model)
    for each in (loaded, gone_on):
        assert torch.equal(
            model.generate(**each.ask(questions), max_new_tokens=5, do_sample=False, pad_token_id=0), expected
        )
    if "every" in recipe:  # queries that wait for the next event are in the file
        model(prompt(2, 2), past_key_values=gone_on, use_cache=True)
        gone_on.save(tmp_path / "later")
        later = keepset.Cache.load(tmp_path / "later", model)
        new = prompt(2, 4, seed=2)
        right = model(new, past_key_values=gone_on, use_cache=True).logits
        torch.testing.assert_close(
            model(new, past_key_values=later, use_cache=True).logits, right, rtol=1e-4, atol=1e-4
        )
    else:
        full = keepset.Cache(model, recipe)
        model(prompt(2, 20), past_key_values=full, use_cache=True)
        check_copies(model, full, tmp_path / "copies")


@torch.no_grad()
def test_what_is_refused() -> None:
    model, ids = latent("deepseek_v3"), prompt(1, LENGTH)
    with refusal("no value can be replaced by itself: leave match out of the recipe"):
        generate(model, ids, keepset.Cache(model, "match(knorm, keep=12)"), max_new_tokens=2)
    other = build("deepseek_v3")
    expand = other.model.layers[0].self_attn.expand_kv
    other.model.layers[0].self_attn.expand_kv = lambda *parts: tuple(2 * part for part in expand(*parts))
    with refusal("DeepseekV3Attention makes keys and values of what it caches in a way that keepset does not know"):
        generate(other, ids, keepset.Cache(other, "knorm(keep=12)"), max_new_tokens=2)


@torch.no_grad()
def test_what_a_broken_call_has_left_serves_no_other_model() -> None:
    def never(new: Any) -> Tensor:
        raise AssertionError

    model, ids = tiny("llama"), prompt(1, LENGTH)
    model.set_attn_implementation("keepset")
    expected = model(ids, use_cache=False).logits
    set_pending_latents(never, 5, torch.zeros(1, 1, LENGTH, LATENT))
    assert torch.equal(model(ids, use_cache=False).logits, expected)
