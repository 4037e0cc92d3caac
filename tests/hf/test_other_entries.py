"""Models whose entries are others than each layer's own keys and values: shared by layers, or latents."""

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
from tests.hf.models import (
    PLAIN,
    check_copies,
    generate,
    padded_prompt,
    prompt,
    refusal,
    tiny,
    untrained,
    with_random_weights,
)

LENGTH, HEADS, KV_HEADS, LATENT, ROTATED = 36, 4, 2, 24, 8
READERS = {"gemma3n_text": [1, 3], "gemma4_text": [1, 3, 4]}
"""The layer that has the entries, and those that read them, which have none. Sliding layers share theirs, too."""
LATENTS = "deepseek_v2", "deepseek_v3", "minicpm3"
latent = cache(build)
by_model = pytest.mark.parametrize("kind", [*READERS, *LATENTS])
by_sharing, by_latents = pytest.mark.parametrize("kind", READERS), pytest.mark.parametrize("kind", LATENTS)


@cache
def shared(kind: str) -> Any:
    if kind == "gemma3n_text":
        return build(kind)
    full, sliding = "full_attention", "sliding_attention"
    heads = dict(head_dim=16, global_head_dim=32, num_global_key_value_heads=KV_HEADS, hidden_size_per_layer_input=0)
    layers = dict(num_hidden_layers=5, num_kv_shared_layers=3, layer_types=[sliding, full, sliding, full, full])
    torch.manual_seed(0)
    return with_random_weights(untrained("gemma4_text", **heads, **layers, sliding_window=24))


def model_of(kind: str) -> Any:
    return shared(kind) if kind in READERS else latent(kind)


@by_model
def test_its_own_tokens_if_all_stays(kind: str) -> None:
    model, ids = model_of(kind), prompt(1, LENGTH)
    model.set_attn_implementation("sdpa")
    expected = generate(model, ids, DynamicCache(config=model.config), max_new_tokens=5).sequences
    for recipe in ("knorm(keep=1.0)", "adakv(snapkv(window=5), keep=99, every=3)"):
        assert torch.equal(generate(model, ids, keepset.Cache(model, recipe), max_new_tokens=5).sequences, expected)


@pytest.mark.few(7)
@pytest.mark.cross
@pytest.mark.parametrize("kind", [*READERS, "deepseek_v3"])
@pytest.mark.parametrize(
    "recipe",
    [
        *("h2o(keep=14)", "adakv(snapkv(window=5), keep=14)", "criticalkv(expected_attention(future=8), keep=14)"),
        *("reread(keep=14)", "prompt_queries(keep=14)", "pool(tova, keep=14, every=3)"),
        "expected_attention(future=8, keep=14, every=4)",
    ],
)
def test_dropped_entries_are_hidden_from_every_head_and_layer_that_reads_them(kind: str, recipe: str) -> None:
    check_dropped(model_of(kind), recipe, new=7)


def check_dropped(model: Any, recipe: str, new: int) -> None:
    past = keepset.Cache(model, recipe, history=True)
    output = generate(model, prompt(1, LENGTH), past, max_new_tokens=new)
    shares = next(iter(past.managed_layers)) == 1
    assert not shares or list(past.managed_layers) == [1]
    assert past.keep_set.entries == 14 * (KV_HEADS if shares else len(past.managed_layers))
    gap = torch.stack(output.logits, 1) - masked(model, past, output)
    assert gap.abs().max() < 2e-3 * max(float(output.logits[0].std()), 1.0)


@pytest.mark.few
@by_model
@pytest.mark.parametrize("recipe", ["adakv(snapkv(window=5), keep=14)", "snapkv(window=5, keep=14, every=4)"])
@torch.no_grad()
def test_batches_files_forks_and_tokens_taken_back(kind: str, recipe: str, tmp_path: Path) -> None:
    model, (ids, mask), questions = model_of(kind), padded_prompt([0, 7], LENGTH), prompt(2, 3, seed=1)
    past, alone = keepset.Cache(model, recipe), keepset.Cache(model, recipe)
    model(ids, attention_mask=mask, past_key_values=past, use_cache=True)
    model(ids[1:, 7:], past_key_values=alone, use_cache=True)
    assert past.keep_set.positions(1, 1, 0).tolist() == alone.keep_set.positions(1, 0, 0).tolist()

    def answered(cache: keepset.Cache) -> Tensor:
        return model.generate(**cache.ask(questions), max_new_tokens=5, do_sample=False, pad_token_id=0)

    gone_on, expected = past.fork(), answered(past)
    gone_on.save(tmp_path / "context")
    for continued in (keepset.Cache.load(tmp_path / "context", model), gone_on):
        assert torch.equal(answered(continued), expected)
    if "every" in recipe:  # queries that wait for the next event are in the file
        model(prompt(2, 2), past_key_values=gone_on, use_cache=True)
        gone_on.save(tmp_path / "later")
        later, new = keepset.Cache.load(tmp_path / "later", model), prompt(2, 4, seed=2)
        ours, right = (model(new, past_key_values=cache, use_cache=True).logits for cache in (later, gone_on))
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)
    elif kind in LATENTS:  # the others' sliding windows take nothing back
        full = keepset.Cache(model, recipe)
        model(prompt(2, 20), past_key_values=full, use_cache=True)
        check_copies(model, full, tmp_path / "copies")


# --- shared by layers


def in_groups(layers: list[Tensor]) -> Tensor:
    """Numbers of query heads of several layers: of a KV head's, those of the first layer first, then the next one's."""
    group = HEADS // KV_HEADS
    return torch.cat([layer[kv * group : (kv + 1) * group] for kv in range(KV_HEADS) for layer in layers])


@by_sharing
@torch.no_grad()
def test_a_method_sees_the_queries_of_all_layers(kind: str) -> None:
    """Of a KV head's group the query heads are those of every layer, whatever is made of queries."""
    model, ids, layers = shared(kind), prompt(1, LENGTH), READERS[kind]
    columns, projection = AttentionColumns(ColumnStatistic.SUM), OutputProjection()
    needs = Needs(RecentQueries(6), columns, projection, QueryMoments(4))
    (seen,) = Recorder(model, needs).prefill(ids).observations
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("plain")
    plain(ids, use_cache=False)
    queries = [PLAIN[layer][0] for layer in layers]
    torch.testing.assert_close(seen.queries[0], in_groups(queries)[:, -6:], rtol=1e-4, atol=1e-5)

    def attention(layer: int) -> Tensor:
        asked, keys, scaling = PLAIN[layer]
        logits = asked @ keys.repeat_interleave(HEADS // KV_HEADS, 0).mT * scaling
        return logits.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), float("-inf")).softmax(-1)

    received = in_groups([attention(layer).sum(1) for layer in layers])
    torch.testing.assert_close(seen[columns][0], received, rtol=1e-4, atol=1e-5)
    weights = [plain.model.layers[layer].self_attn.o_proj.weight.T.unflatten(0, (HEADS, -1)) for layer in layers]
    torch.testing.assert_close(seen[projection], in_groups(weights))
    # Queries as they were before rotation: the model's halves rotate together.
    rotary = plain.model.rotary_emb
    kinds = {"layer_type": "full_attention"}
    cos, sin = rotary(torch.zeros(1, LENGTH, 64), torch.arange(LENGTH)[None], **kinds)
    still = [
        torch.cat([query[..., size:], -query[..., :size]], -1) for query in queries for size in [query.shape[-1] // 2]
    ]
    undone = [query * cos[0] + turned * sin[0] for query, turned in zip(queries, still, strict=True)]
    mean = in_groups([each[:, 4:].mean(1) for each in undone])
    torch.testing.assert_close(seen[QueryMoments(4)].mean[0], mean, rtol=1e-3, atol=1e-4)


@by_sharing
@torch.no_grad()
def test_a_second_pass_counts_what_all_layers_pay(kind: str) -> None:
    model, ids = shared(kind), prompt(1, LENGTH)
    which = SecondPass(frozenset(ColumnStatistic))
    (observations,) = Recorder(model, Needs(which)).prefill(ids).observations
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    attentions = eager(torch.cat([ids, ids], 1), use_cache=False, output_attentions=True).attentions
    paid = in_groups([attentions[layer][0, :, LENGTH:, :LENGTH] for layer in READERS[kind]])
    expected = {"sum": paid.sum(1), "max": paid.amax(1), "square": paid.square().sum(1)}
    for name, right in expected.items():
        torch.testing.assert_close(observations[which].statistics[name][0], right, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_what_shared_layers_refuse() -> None:
    model, ids = shared("gemma3n_text"), prompt(1, LENGTH)
    with refusal("asks for queries that one layer makes of hidden states: choose another one"):
        keepset.Cache(model, "gvote")
    drafts = keepset.Cache(model, "knorm(keep=14)", prompt_length=LENGTH - 4)
    with refusal("share keys and values cannot take drafted tokens together with a prompt: leave assisted"):
        model(ids, past_key_values=drafts, use_cache=True)


@torch.no_grad()
def test_entries_that_a_layer_reads_in_another_way_are_told_apart() -> None:
    """As on a second device, where a layer gets a copy of the keys."""
    model, ids = copy.deepcopy(shared("gemma3n_text")), prompt(1, LENGTH)

    def copied(module: Any, args: Any, kwargs: Any) -> Any:
        states = {layer: (keys.clone(), values) for layer, (keys, values) in kwargs["shared_kv_states"].items()}
        return args, {**kwargs, "shared_kv_states": states}

    model.model.layers[3].self_attn.register_forward_pre_hook(copied, with_kwargs=True)
    past = keepset.Cache(model, "knorm(keep=14)")
    model(ids, past_key_values=past, use_cache=True)
    with refusal("does not hold a whole prompt"):
        past.ask(ids)
    with refusal("share the keys and values of layer 1 in a way that keepset does not see"):
        model(ids[:, :1], past_key_values=past, use_cache=True)


# --- latents


@pytest.mark.parametrize("recipe", ["adakv(snapkv(window=5), keep=14)", "pool(tova, keep=14, every=3)"])
@pytest.mark.full
def test_triton_hides_dropped_entries_from_all_heads(recipe: str, triton_interpreted: None) -> None:
    check_dropped(latent("deepseek_v3"), recipe, new=6)


@by_latents
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
    observations = Recorder(model, needs).prefill(ids).observations[1]
    assert observations.keys.shape == (1, 1, LENGTH, LATENT + ROTATED) and observations.values.shape[-1] == LATENT
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    paid = eager(ids, use_cache=False, output_attentions=True).attentions[1][0]
    torch.testing.assert_close(observations.window_attention(6)[0], paid[:, -6:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(observations[columns][0], paid.sum(1), rtol=1e-4, atol=1e-5)
    twice = eager(torch.cat([ids, ids], 1), use_cache=False, output_attentions=True).attentions[1][0]
    received = twice[:, LENGTH:, :LENGTH].amax(1)
    torch.testing.assert_close(observations[second].statistics[ColumnStatistic.MAX][0], received, rtol=1e-3, atol=1e-5)
    # What an entry adds to the layer's output by each head.
    module, computed = eager.model.layers[1].self_attn, {}
    module.register_forward_pre_hook(lambda *call: computed.update(hidden=call[2]["hidden_states"]), with_kwargs=True)
    eager(ids, use_cache=False)
    cached = module.kv_a_layernorm(module.kv_a_proj_with_mqa(computed["hidden"])[..., :LATENT])
    torch.testing.assert_close(observations.values[0, 0], cached[0], rtol=1e-4, atol=1e-5)
    values = module.kv_b_proj(cached[0]).unflatten(-1, (HEADS, -1))[..., -module.v_head_dim :]
    weight = module.o_proj.weight.T.unflatten(0, (HEADS, -1))
    expected = torch.einsum("nhv,hvd->hnd", values, weight)
    torch.testing.assert_close(observations.values[0] @ observations[projection], expected, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_queries_before_rotation_are_those_of_position_0() -> None:
    """Rotated to any position, their products with keys are those of the model there."""
    model, ids = latent("deepseek_v3"), prompt(1, LENGTH)
    observations = Recorder(model, Needs(QueryMoments(0), RecentQueries(1))).prefill(ids).observations[0]
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
    torch.testing.assert_close(observations[QueryMoments(0)].mean[0], expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_bytes_are_those_of_latents() -> None:
    model, ids = latent("deepseek_v3"), prompt(2, LENGTH)
    past, whole = keepset.Cache(model, "knorm(keep=12)"), DynamicCache(config=model.config)
    for layer in (past, whole):
        model(ids, past_key_values=layer, use_cache=True)
    entries = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers)
    assert entries == 2 * 2 * LENGTH * (LATENT + ROTATED) * 4 == past.nbytes_full == past.events[0].nbytes_before
    assert past.keep_set.nbytes == entries * 12 // LENGTH
    positions = 2 * 2 * 12 * 4
    assert past.nbytes == past.keep_set.nbytes + positions and past.share == pytest.approx(12 / LENGTH, rel=0.2)


@torch.no_grad()
def test_what_latents_refuse() -> None:
    model, ids = latent("deepseek_v3"), prompt(1, LENGTH)
    with refusal("no value can be replaced by itself: leave match out of the recipe"):
        generate(model, ids, keepset.Cache(model, "match(knorm, keep=12)"), max_new_tokens=2)
    refused_text = build("deepseek_v3")
    expand = refused_text.model.layers[0].self_attn.expand_kv
    refused_text.model.layers[0].self_attn.expand_kv = lambda *parts: tuple(2 * part for part in expand(*parts))
    with refusal("DeepseekV3Attention makes keys and values of what it caches in a way that keepset does not know"):
        generate(refused_text, ids, keepset.Cache(refused_text, "knorm(keep=12)"), max_new_tokens=2)


@torch.no_grad()
def test_what_a_broken_call_has_left_serves_no_other_model() -> None:
    def never(new: Any) -> Tensor:
        raise AssertionError

    model, ids = tiny("llama"), prompt(1, LENGTH)
    model.set_attn_implementation("keepset")
    expected = model(ids, use_cache=False).logits
    set_pending_latents(never, 5, torch.zeros(1, 1, LENGTH, LATENT))
    assert torch.equal(model(ids, use_cache=False).logits, expected)
