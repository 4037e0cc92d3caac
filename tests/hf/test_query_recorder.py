"""What events look at is added up while queries pass: the same numbers as from the queries, in hardly any bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import keepset
from keepset.core.budget import Budget
from keepset.core.feature import Needs
from keepset.core.features.queries import ReferenceQueries, WindowAttention
from keepset.core.features.runtime_features import RecentQueries
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.core.traits import Traits
from keepset.kernels.softmax import GroupReduction
from tests.hf.models import extended, feed, padded_prompt, prompt, refusal, tiny, untrained


@dataclass(frozen=True)
class Both(Method):
    """Has the queries of windows beside what was added up of them."""

    name: ClassVar[str] = "both"
    paper: ClassVar[str] = "none"
    window: int = 6

    @property
    def sums(self) -> list[WindowAttention]:
        rules = [WindowAttention(self.window, sums_of=reduction) for reduction in GroupReduction]
        return [*rules, WindowAttention(self.window, history=True), WindowAttention(3)]

    @cached_property
    def traits(self) -> Traits:
        return Traits(needs=Needs(RecentQueries(self.window), *self.sums))

    def score(self, observation: Observation) -> Tensor:
        return observation.values.float().norm(dim=-1)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("architecture", "every", "padding", "dtype"),
    [
        ("llama_mha", 6, [0], torch.float32),
        ("llama", 9, [0, 5], torch.float32),
        ("llama_mqa", 11, [0], torch.float32),
        ("llama", 4, [2, 0], torch.float32),
        ("llama", 7, [0], torch.bfloat16),
    ],
    ids=str,
)
@torch.no_grad()
def test_sums_are_those_that_the_windows_queries_give(
    architecture: str, every: int, padding: list[int], dtype: torch.dtype
) -> None:
    """Where an interval is shorter than the window, of as many queries as it has."""
    compared = 0

    def compare(observation: Observation, budget: Budget, keep_set: keepset.KeepSet) -> None:
        nonlocal compared
        if observation.lengths[0] == observation.prompts[0]:
            return
        for feature in method.sums:
            window = min(feature.window, every)
            ours, right = observation[feature], feature.made(observation, window)
            assert ours.window == right.window == window
            exact = dtype == torch.float32
            close = dict(rtol=1e-5, atol=1e-6) if exact else dict(rtol=1e-2, atol=1e-3)
            torch.testing.assert_close(
                ours.attention_sums[observation.valid], right.attention_sums[observation.valid], **close
            )
            compared += 1
        usage = observation.by_query_group(observation.window_usage(min(6, every)))
        for feature, right in zip(method.sums[:2], (usage.mean(2), usage.transpose(2, 3)), strict=True):
            received, valid = observation[feature].attention_sums, observation.valid
            torch.testing.assert_close(received[valid], right[valid], rtol=1e-2, atol=1e-3)

    method, model = Both(), tiny(architecture)
    if dtype != torch.float32:
        model = LlamaForCausalLM(model.config).to(dtype).eval()
    recipe = keepset.Recipe.of(method, keep=11, every=every)
    ids, mask = padded_prompt(padding, 20)
    past = keepset.Cache(model, recipe, observer=compare)
    for tokens in [20, *[1] * (2 * every), 2 * every + 3, *[1] * every, 3, *[1] * every]:
        mask = extended(mask, past.get_seq_length() + tokens)
        new = ids if tokens == 20 else prompt(len(padding), tokens, tokens)
        feed(model, past, new, mask)
    assert compared >= 5 * 2 * 5


@pytest.mark.parametrize("options", ["every=6", "turns=True"])
@torch.no_grad()
def test_a_reference_after_the_prompt_is_the_newest_queries_as_if_they_came_next(options: str) -> None:
    """Made here of what the projection gives, turned by hand to the position after the newest token."""
    model, compared, projected = tiny("llama"), 0, dict[int, list[Tensor]]()
    padding = [0, 5] if "every" in options else [0]

    def project(layer: int) -> Any:
        return lambda module, given, queries: projected.setdefault(layer, []).append(queries)

    def compare(observation: Observation, budget: Budget, keep_set: keepset.KeepSet) -> None:
        nonlocal compared
        if observation.lengths[0] == observation.prompts[0] and "every" in options:
            return
        spread, newest = observation[ReferenceQueries(1, 1)]
        before = torch.cat(projected[observation.layer_ids[0]], 1)[:, -4:].unflatten(-1, (-1, observation.head_dim))
        cos, sin = model.model.rotary_emb(before, observation.lengths[:, None])
        left, right = before.transpose(1, 2).chunk(2, -1)
        turned = torch.cat([left, right], -1) * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]
        assert newest.exists.all() and not spread.exists.shape[1]
        torch.testing.assert_close(newest.queries, turned, rtol=1e-4, atol=1e-5)
        compared += 1

    feed(model, keepset.Cache(model, "match(knorm, keep=9)"), *padded_prompt([0], 20))  # looks at the rotation, once
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(project(number)) for number, layer in enumerate(model.model.layers)
    ]
    try:
        cache = keepset.Cache(model, f"match(knorm, window=4, keep=9, {options})", observer=compare)
        ids, mask = padded_prompt(padding, 20)
        for tokens in (20, 3, 3, 6):
            mask = extended(mask, cache.get_seq_length() + tokens)
            feed(model, cache, ids if tokens == 20 else prompt(len(padding), tokens, tokens), mask)
        if "turns" in options:
            cache.compact()
    finally:
        for hook in hooks:
            hook.remove()
    assert compared == (2 if "every" in options else 1) * len(model.model.layers)


def shaped(query_heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    sizes = dict(hidden_size=4 * query_heads, intermediate_size=16, num_hidden_layers=1, max_position_embeddings=4096)
    heads = dict(num_attention_heads=query_heads, num_key_value_heads=kv_heads, head_dim=size)
    return untrained("llama", **sizes, **heads).to(dtype)


SMOLLM2, HALF_A_BILLION = (9, 3, 64, torch.float32, 96, 32), (14, 2, 64, torch.bfloat16, 96, 32)
OF_AMS_PAPER = (28, 4, 128, torch.bfloat16, 256, 512)


@torch.no_grad()
def most_bytes(shape: tuple[Any, ...], method: str) -> float:
    """The most that a cache weighs over an interval, in keep + every entries."""
    query_heads, kv_heads, size, dtype, keep, every = shape
    model, most = shaped(query_heads, kv_heads, size, dtype), 0
    parsed = keepset.Recipe.parse(method)
    recipe = keepset.Recipe.of(parsed.method, keep=keep, every=every)
    past = keepset.Cache(model, recipe)
    model(prompt(1, keep + 40), past_key_values=past, logits_to_keep=1)
    for tokens in [every - 30] * (every > 32) + [1] * min(every, 30 if every > 32 else every):
        model(prompt(1, tokens), past_key_values=past, logits_to_keep=1)
        if len(past.events) == 1:
            most = max(most, past.nbytes)
    assert len(past.events) == 2
    return most / ((keep + every) * kv_heads * 2 * size * dtype.itemsize)


SHAPES = {"smollm2": SMOLLM2, "half a billion": HALF_A_BILLION, "ams": OF_AMS_PAPER}
OF_EACH_HEAD = "compilerkv(elastic=False, global_mean=False)"
"""Has sums of each query head. The half billion has seven to a KV head: 28 bytes beside an entry's 256."""
METHODS = ["ams(tova)", "r_kv", "zigzag(snapkv)", "compilerkv(elastic=False)", OF_EACH_HEAD]
MORE = ["snapkv", "rpc", "tova", "keydiff", "ams(knorm)", "ams(snapkv)", "adakv(snapkv)", "pyramid(snapkv)"]
MORE += ["chunkkv(snapkv)", "criticalkv(snapkv)", "dynamic(snapkv)", "pool(snapkv)"]


@pytest.mark.few(2)
@pytest.mark.cross
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", [*METHODS, *(pytest.param(method, marks=pytest.mark.full) for method in MORE)])
@pytest.mark.filterwarnings("ignore:compilerkv has no tables")
def test_a_cache_weighs_a_tenth_more_than_its_entries_at_most(shape: str, method: str) -> None:
    if (shape, method) != ("half a billion", OF_EACH_HEAD):
        assert 1 < most_bytes(SHAPES[shape], method) <= 1.1


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_moments_weigh_as_much_as_their_queries_or_less(shape: tuple[Any, ...]) -> None:
    """Each query head's covariance is a triangle of d x (d + 1) / 2 numbers, which no tenth of a cache holds."""
    query_heads, kv_heads, size, dtype, keep, every = shape
    triangle = 4 * query_heads * (size * (size + 1) // 2 + size)
    query = query_heads * size * dtype.itemsize + 2 * size * dtype.itemsize + 8
    entries = (keep + every) * kv_heads * 2 * size * dtype.itemsize
    least = min(triangle, (every - 1) * query) / entries
    assert 0.3 < least < most_bytes(shape, "ams(expected_attention)") - 1 < least + 0.15


@torch.no_grad()
def test_what_is_added_up_is_not_taken_back_in_part() -> None:
    model = tiny("llama")
    past = keepset.Cache(model, "snapkv(window=9, kernel=3, keep=12, every=16)")
    model(prompt(1, 20), past_key_values=past)
    for step in range(8):
        model(prompt(1, 1, step), past_key_values=past)  # to 28: the window begins at 27
    model(prompt(1, 5), past_key_values=past)
    past.crop(-1)  # which waits
    model(prompt(1, 2), past_key_values=past)
    nbytes = past.nbytes
    with refusal("added up for the next compression already"):
        past.crop(-3)
    assert past.nbytes == nbytes and past.get_seq_length() == 34
    past.crop(27)  # all of the window
    assert past.get_seq_length() == 27


@pytest.mark.cross
@pytest.mark.parametrize("chunks", [[14], [1] * 14, [3, 9, 2], [5, 1, 8]], ids=str)
@pytest.mark.parametrize("padding", [range(8, 14), range(9, 12), range(2, 11)], ids=str)
@torch.no_grad()
def test_padding_in_a_window_counts_as_tokens(padding: range, chunks: list[int]) -> None:
    """Its request has fewer queries there, whenever they are added up, in a batch and alone."""
    method, window, compared = Both(), 6, []
    ids, mask = prompt(2, 34), torch.ones(2, 34, dtype=torch.long)
    mask[1, [20 + token for token in padding]] = 0
    begins = mask[:, : 34 - window].sum(-1)

    def compare(observation: Observation, budget: Budget, keep_set: keepset.KeepSet) -> None:
        if observation.lengths[0] == observation.prompts[0]:
            return
        rows = slice(-len(observation.lengths), None)
        at = observation.query_positions
        counts = (at >= begins[rows, None]) & (at >= 0)
        usage = observation.by_query_group((observation.window_attention(window) * counts[:, None, :, None]).sum(2))
        received = observation[WindowAttention(window)].attention_sums
        torch.testing.assert_close(received, usage.mean(2), rtol=1e-5, atol=1e-6)
        compared.append(len(received))

    for rows in (slice(0, 2), slice(1, 2)):
        past = keepset.Cache(tiny("llama"), keepset.Recipe.of(method, keep=11, every=14), observer=compare)
        end = 0
        for tokens in (20, *chunks):
            end += tokens
            at = (mask[rows, :end].cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
            new = ids[rows, end - tokens : end]
            tiny("llama")(new, attention_mask=mask[rows, :end], position_ids=at, past_key_values=past)
        assert [event.length for event in past.events] == [20, 34]
    assert compared == [2, 2, 1, 1]
