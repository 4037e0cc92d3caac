"""Layers that share keys and values: compressed once, with the queries of all layers that read them."""

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
from keepset.hf.prompt_session import Recorder
from keepset.kernels.columns import ColumnStatistic
from tests.hf.contract.builds import build
from tests.hf.contract.check import masked
from tests.hf.models import (
    PLAIN,
    generate,
    padded_prompt,
    prompt,
    refusal,
    same_keep_set,
    untrained,
    with_random_weights,
)

LENGTH, HEADS, KV_HEADS = 36, 4, 2
READERS = {"gemma3n_text": [1, 3], "gemma4_text": [1, 3, 4]}
"""The layer that has the entries, and those that read them, which have none. Sliding layers share theirs, too."""
by_model = pytest.mark.parametrize("kind", READERS)


@cache
def shared(kind: str) -> Any:
    """A tiny model."""
    if kind == "gemma3n_text":
        return build(kind)
    full, sliding = "full_attention", "sliding_attention"
    heads = dict(head_dim=16, global_head_dim=32, num_global_key_value_heads=KV_HEADS, hidden_size_per_layer_input=0)
    layers = dict(num_hidden_layers=5, num_kv_shared_layers=3, layer_types=[sliding, full, sliding, full, full])
    torch.manual_seed(0)
    return with_random_weights(untrained("gemma4_text", **heads, **layers, sliding_window=24))


@by_model
def test_its_own_tokens_if_all_stays(kind: str) -> None:
    model, ids = shared(kind), prompt(1, LENGTH)
    model.set_attn_implementation("sdpa")
    expected = generate(model, ids, DynamicCache(config=model.config), max_new_tokens=8).sequences
    for recipe in ("knorm(keep=1.0)", "adakv(snapkv(window=5), keep=99, every=3)"):
        assert torch.equal(generate(model, ids, keepset.Cache(model, recipe), max_new_tokens=8).sequences, expected)


@pytest.mark.few(4)
@pytest.mark.cross
@by_model
@pytest.mark.parametrize(
    "recipe",
    [
        "h2o(keep=14)",
        "adakv(snapkv(window=5), keep=14)",
        "criticalkv(expected_attention(future=8), keep=14)",
        "reread(keep=14)",
        "prompt_queries(keep=14)",
        "pool(tova, keep=14, every=3)",
        "expected_attention(future=8, keep=14, every=4)",
    ],
)
def test_dropped_entries_are_hidden_from_every_layer_that_reads_them(kind: str, recipe: str) -> None:
    model, ids = shared(kind), prompt(1, LENGTH)
    past = keepset.Cache(model, recipe, history=True)
    output = generate(model, ids, past, max_new_tokens=9)
    assert list(past.managed_layers) == [1] and past.keep_set.entries == 14 * KV_HEADS
    gap = torch.stack(output.logits, 1) - masked(model, past, output)
    assert gap.abs().max() < 2e-3 * max(float(output.logits[0].std()), 1.0)


def in_groups(layers: list[Tensor]) -> Tensor:
    """Numbers of query heads of several layers: of a KV head's, those of the first layer first, then the next one's."""
    group = HEADS // KV_HEADS
    return torch.cat([layer[kv * group : (kv + 1) * group] for kv in range(KV_HEADS) for layer in layers])


@by_model
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


@by_model
@torch.no_grad()
def test_a_second_pass_counts_what_all_layers_pay(kind: str) -> None:
    model, ids = shared(kind), prompt(1, LENGTH)
    which = SecondPass(frozenset(ColumnStatistic))
    (seen,) = Recorder(model, Needs(which)).prefill(ids).observations
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    attentions = eager(torch.cat([ids, ids], 1), use_cache=False, output_attentions=True).attentions
    paid = in_groups([attentions[layer][0, :, LENGTH:, :LENGTH] for layer in READERS[kind]])
    expected = {"sum": paid.sum(1), "max": paid.amax(1), "square": paid.square().sum(1)}
    for name, right in expected.items():
        torch.testing.assert_close(seen[which].statistics[name][0], right, rtol=1e-3, atol=1e-5)


@by_model
@torch.no_grad()
def test_batches_files_forks_and_tokens_taken_back(kind: str, tmp_path: Path) -> None:
    model, (ids, mask) = shared(kind), padded_prompt([0, 7], LENGTH)
    recipe = "adakv(snapkv(window=5), keep=14)"
    past = keepset.Cache(model, recipe)
    model(ids, attention_mask=mask, past_key_values=past, use_cache=True)
    alone = keepset.Cache(model, recipe)
    model(ids[1:, 7:], past_key_values=alone, use_cache=True)
    assert past.keep_set.positions(1, 1, 0).tolist() == alone.keep_set.positions(1, 0, 0).tolist()
    past.save(tmp_path / "context")
    loaded, new = keepset.Cache.load(tmp_path / "context", model), prompt(2, 3, seed=1)
    assert same_keep_set(loaded.keep_set, past.keep_set)
    expected = model.generate(**past.ask(new), max_new_tokens=5, do_sample=False, pad_token_id=0)
    for each in (loaded, past.fork()):
        assert torch.equal(model.generate(**each.ask(new), max_new_tokens=5, do_sample=False, pad_token_id=0), expected)


@torch.no_grad()
def test_what_is_refused() -> None:
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
