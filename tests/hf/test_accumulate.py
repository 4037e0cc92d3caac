"""Observations as the runtime makes them, against the same numbers computed naively from the model's own modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import keepset
from keepset.core.budget import Budget
from keepset.core.feature import Needs
from keepset.core.features.attention import PromptQueryAttention
from keepset.core.features.moments import HiddenMoments, QueryMoments
from keepset.core.features.runtime_features import OutputProjection, RecentQueries
from keepset.core.observation import Observation
from keepset.hf.model_support import output_projection
from keepset.hf.prompt_session import Recorder
from keepset.methods.window import TOVA
from tests.hf.looking import looking, shown
from tests.hf.models import (
    ARCHITECTURES,
    PLAIN,
    generate,
    hidden_states,
    padded_prompt,
    prompt,
    rotated,
    same_keep_set,
    tiny,
)
from tests.methods.naive import MAX, SUM

LENGTH, WINDOW, FUTURE = 36, 8, 5
SKIPS = (0, 3, 10)
ASKED = (1, 4, 50)
PADDINGS = [[0, 0], [0, 7], [3, 30]]
"""The last leaves a request that is shorter than the window and than the longest skip."""


MOMENTS = [of(skip) for skip in SKIPS for of in (QueryMoments, HiddenMoments)]
EVERYTHING = looking(RecentQueries(WINDOW), SUM, MAX, *MOMENTS, *map(PromptQueryAttention, ASKED))


def observed(architecture: str, padding: list[int], chunk: int | None = None) -> dict[int, Observation]:
    model = tiny(architecture)
    ids, mask = padded_prompt(padding, LENGTH)
    past = keepset.Cache(model, EVERYTHING, prompt_length=LENGTH if chunk else None)
    with shown() as observations:
        generate(model, ids, past, mask, max_new_tokens=1, prefill_chunk_size=chunk)
    return observations


# --- the same from the model itself, one request without padding at a time


@dataclass
class Naive:
    """One layer's attention over one request: `[heads, tokens, head_dim]`, and what went into it."""

    module: Any
    rotary: Any
    queries: Tensor
    keys: Tensor
    hidden: Tensor

    @property
    def attention(self) -> Tensor:
        group = len(self.queries) // len(self.keys)
        logits = self.queries @ self.keys.repeat_interleave(group, 0).transpose(1, 2) * self.module.scaling
        n = logits.shape[-1]
        return logits.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1)

    def projected(self, hidden: Tensor) -> Tensor:
        """Queries before rotation, `[heads, tokens, head_dim]`."""
        queries = self.module.q_proj(hidden).unflatten(-1, (-1, self.module.head_dim))
        if hasattr(self.module, "q_norm"):
            queries = self.module.q_norm(queries)
        return queries.transpose(0, 1)

    def rotated(self, queries: Tensor, position: int) -> Tensor:
        return rotated(self.module, self.rotary, queries, position)

    def ahead(self, queries: Tensor) -> Tensor:
        n = self.queries.shape[1]
        return torch.stack([self.rotated(queries, at) for at in range(n, n + FUTURE)]).mean(0)


@cache
@torch.no_grad()
def naive(architecture: str, row: int, pad: int) -> list[Naive]:
    model = tiny(architecture)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("plain")
    with hidden_states(model) as inputs:
        model(prompt(2, LENGTH)[row : row + 1, pad:], use_cache=False)
    model.set_attn_implementation(implementation)
    return [
        Naive(layer.self_attn, model.model.rotary_emb, *PLAIN[index][:2], inputs[index][0][0])
        for index, layer in enumerate(model.model.layers)
    ]


def assert_close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=2e-5)


by_architecture = pytest.mark.parametrize(
    "architecture", ["llama", "llama_yarn", "qwen3", "smollm3", "gemma4", "ministral3", "phi", "cohere"]
)
by_padding = pytest.mark.parametrize("padding", PADDINGS, ids=str)
by_chunk = pytest.mark.parametrize("chunk", [None, 7, 16, 35])


@pytest.mark.few(4)
@pytest.mark.cross
@by_architecture
@by_padding
@by_chunk
@torch.no_grad()
def test_what_is_shown(architecture: str, padding: list[int], chunk: int | None) -> None:
    observations = observed(architecture, padding, chunk)
    for row, pad in enumerate(padding):
        of_layers = naive(architecture, row, pad)
        for layer, observation in observations.items():
            expected = of_layers[layer]
            assert observation.lengths[row] == LENGTH - pad
            check_entries(observation, expected, row)
            check_window(observation, expected, row)
            check_columns(observation, expected, row)
            check_moments(observation, expected, row)
            check_future(observation, expected, row)
            check_prompt_queries(observation, expected, row)


def check_entries(observation: Observation, expected: Naive, row: int) -> None:
    n = expected.keys.shape[1]
    assert torch.equal(
        observation.valid[row], torch.arange(observation.keys.shape[2]).expand_as(observation.valid[row]) < n
    )
    assert torch.equal(observation.positions[row, :, :n].long(), torch.arange(n).expand(len(expected.keys), n))
    assert_close(observation.keys[row, :, :n], expected.keys)
    assert observation.keys[row, :, n:].abs().sum() == 0 and observation.values[row, :, n:].abs().sum() == 0
    assert observation.scaling == expected.module.scaling


def check_window(observation: Observation, expected: Naive, row: int) -> None:
    n = expected.queries.shape[1]
    count = min(WINDOW, n)
    assert observation.queries.shape[2] == WINDOW
    assert observation.queries.untyped_storage().nbytes() == observation.queries.nbytes  # no view of the whole prompt's
    positions = observation.query_positions[row].tolist()
    assert positions[WINDOW - count :] == list(range(n - count, n))
    assert all(position < 0 for position in positions[: WINDOW - count])
    assert_close(observation.queries[row, :, WINDOW - count :], expected.queries[:, n - count :])
    attention = observation.window_attention(WINDOW)[row]
    assert_close(attention[:, WINDOW - count :, :n], expected.attention[:, n - count :])
    assert attention[:, : WINDOW - count].abs().sum() == 0 and attention[:, :, n:].abs().sum() == 0


def check_columns(observation: Observation, expected: Naive, row: int) -> None:
    n = expected.keys.shape[1]
    for name, statistic in ((SUM, expected.attention.sum(1)), (MAX, expected.attention.amax(1))):
        columns = observation[name][row]
        assert columns.shape[-1] == observation.keys.shape[2]
        assert_close(columns[:, :n], statistic)
        assert columns[:, n:].abs().sum() == 0


def check_moments(observation: Observation, expected: Naive, row: int) -> None:
    for skip in SKIPS:
        hidden = expected.hidden[skip:]
        moments, of_hidden = observation[QueryMoments(skip)], observation[HiddenMoments(skip)]
        if not len(hidden):
            assert moments.mean[row].abs().sum() == 0 and of_hidden.mean[row].abs().sum() == 0
            continue
        assert_close(of_hidden.mean[row], hidden.mean(0))
        assert_close(of_hidden.variance[row], hidden.var(0, correction=0))
        queries = expected.projected(hidden)
        mean = queries.mean(1)
        covariance = torch.stack([head.T.cov(correction=0).view(2 * [head.shape[-1]]) for head in queries])
        assert_close(moments.mean[row], mean)
        assert_close(moments.covariance[row], covariance)
        mean_ahead, covariance_ahead = moments.ahead(FUTURE)
        assert_close(mean_ahead[row], expected.ahead(mean[:, None])[:, 0])
        half = expected.ahead(covariance)
        assert_close(covariance_ahead[row], expected.ahead(half.transpose(1, 2)).transpose(1, 2))


def check_future(observation: Observation, expected: Naive, row: int) -> None:
    hidden = torch.randn(2, 3, expected.hidden.shape[-1], generator=torch.Generator().manual_seed(0))
    assert_close(
        observation[HiddenMoments(0)].queries(hidden, FUTURE)[row], expected.ahead(expected.projected(hidden[row]))
    )


def check_prompt_queries(observation: Observation, expected: Naive, row: int) -> None:
    """Each query at the position after the prompt, over all keys, one by one."""
    heads, n, _ = expected.queries.shape
    group = heads // len(expected.keys)
    for every in ASKED:
        squares = torch.zeros(heads, n)
        query_indices = range(0, n, every)
        for at in query_indices:
            query = expected.rotated(expected.projected(expected.hidden[at : at + 1]), n)[:, 0]
            for head in range(heads):
                logits = expected.keys[head // group] @ query[head] * expected.module.scaling
                squares[head] += logits.softmax(-1).square() / len(query_indices)
        asked_again = observation[PromptQueryAttention(every)][row]
        assert asked_again.shape[-1] == observation.keys.shape[2] and asked_again[:, n:].abs().sum() == 0
        torch.testing.assert_close(asked_again[:, :n], squares, rtol=1e-3, atol=2e-6)


def test_a_model_without_rotation_shows_its_queries() -> None:
    observations = observed("gpt2", [0, 7])
    for observation in observations.values():
        mean, _ = observation[QueryMoments(0)].ahead(FUTURE)
        assert torch.equal(mean, observation[QueryMoments(0)].mean)


def test_prompt_queries_are_of_a_prompt_and_their_time_is_its_methods() -> None:
    model = tiny("llama")
    recorder = Recorder(model, Needs(PromptQueryAttention(2), QueryMoments(0)))
    recorder.prefill(prompt(1, LENGTH))
    moments, together = (recorder.seconds_for(needs) for needs in (Needs(QueryMoments(0)), recorder.needs))
    assert recorder.seconds < moments < together
    strides = Recorder(model, Needs(PromptQueryAttention(1), PromptQueryAttention(4)))
    strides.prefill(prompt(1, LENGTH))
    few, together = (strides.seconds_for(needs) for needs in (Needs(PromptQueryAttention(4)), strides.needs))
    assert strides.seconds < few < together


def test_only_what_is_needed_is_collected() -> None:
    model = tiny("llama")
    with shown() as observations:
        generate(model, prompt(1, LENGTH), keepset.Cache(model, looking(RecentQueries(2))), max_new_tokens=1)
    assert observations[0].queries.shape[2] == 2 and not observations[0].features


# --- the output projection, against what the module makes of values with a single one in them


def attention_modules(model: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Attention modules that have one, with their output projection."""
    names = ("o_proj", "out_proj", "dense", "c_proj")
    return [
        (module, getattr(module, name))
        for module in model.modules()
        if hasattr(module, "layer_idx")
        for name in names
        if hasattr(module, name) and hasattr(module, "is_causal")
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_hot_values_give_the_projections_rows(architecture: str) -> None:
    model = tiny(architecture)
    config = model.config
    heads = config.num_attention_heads
    found = attention_modules(model)
    assert len(found) == config.num_hidden_layers // (2 if architecture == "lfm2" else 1)
    for module, projection in found:
        size = getattr(module, "head_dim", None) or config.hidden_size // heads
        weights = output_projection(module, heads, torch.zeros(1, 1, 1, size))
        assert weights.untyped_storage().data_ptr() == projection.weight.untyped_storage().data_ptr()
        assert not weights.requires_grad
        with torch.no_grad():
            rows = projection(torch.eye(heads * size)) - projection(torch.zeros(1, heads * size))
        torch.testing.assert_close(weights.flatten(0, 1), rows, rtol=1e-5, atol=1e-5)


def test_a_module_without_one_is_refused() -> None:
    module = nn.Module()
    module.o_proj = nn.Linear(8, 8)
    for heads, size in ((4, 2), (2, 4)):
        assert output_projection(module, heads, torch.zeros(1, 1, 1, size)).shape == (heads, size, 8)
    with pytest.raises(keepset.KeepsetError, match="could not find the output projection of Module"):
        output_projection(module, 4, torch.zeros(1, 1, 1, 3))
    module.o_proj.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(
        keepset.KeepsetError, match="could not find the output projection of Module, which must be linear"
    ):
        output_projection(module, 4, torch.zeros(1, 1, 1, 2))


@pytest.mark.parametrize("text", ["criticalkv(snapkv(window=4), keep=12)", "criticalkv(knorm, keep=12, every=5)"])
def test_an_event_sees_the_layers_own_weights(text: str) -> None:
    model = tiny("llama")
    projections: dict[int, torch.Tensor] = {}

    def observer(observation: Any, budget: Any, keep_set: Any) -> None:
        projections[observation.layer] = observation[OutputProjection()]

    cache = keepset.Cache(model, text, observer=observer)
    generate(model, prompt(1, 30), cache, max_new_tokens=8)
    for index, layer in enumerate(model.model.layers):
        assert torch.equal(projections[index].flatten(0, 1), layer.self_attn.o_proj.weight.t())
    assert all(projections[0] is not weights for weights in list(projections.values())[1:])


# --- observers of a cache


@dataclass(frozen=True)
class Counting(TOVA):
    """Counts, in its state, the events that each entry has lived through."""

    name: ClassVar[str] = "counting"

    def remember(self, observation: Observation, scores: Tensor) -> dict[str, Tensor]:
        return {"seen": observation.state.get("seen", torch.zeros_like(scores)) + 1}


@dataclass(frozen=True)
class Together(Counting):
    """Decides for all layers at once."""

    name: ClassVar[str] = "together"
    traits = replace(TOVA.traits, across_layers=True)


@pytest.mark.parametrize("method", [Counting(), Together()], ids=["layer by layer", "across layers"])
def test_observer_sees_what_the_method_saw(method: TOVA) -> None:
    model, ids = tiny("llama"), prompt(2, 20)
    recipe = keepset.Recipe.of(method, keep=12, every=5)
    calls: list[tuple[Observation, keepset.KeepSet]] = []

    def observer(observation: Observation, budget: Budget, keep_set: keepset.KeepSet) -> None:
        assert budget == recipe.budget
        calls.append((observation, keep_set))

    cache = keepset.Cache(model, recipe, history=True, observer=observer)
    tokens: Any = generate(model, ids, cache, max_new_tokens=12).sequences
    layers = cache.compressed_layers
    assert [event.length for event in cache.events] == [20, 25, 30]
    assert [observation.layer for observation, _ in calls] == list(layers) * 3
    for number, event in enumerate(cache.events):
        part = calls[number * len(layers) : (number + 1) * len(layers)]
        for layer, (observation, keep_set) in zip(layers, part, strict=True):
            assert observation.lengths.tolist() == [event.length] * 2
            kept = keep_set.layer(layer).to_record()
            assert event.keep_set is not None
            assert same_keep_set(keepset.KeepSet([kept]), keepset.KeepSet([event.keep_set.layer(layer)]))
            # As it was before the event: what is new has no number yet.
            state = observation.state.get("seen")
            if number == 0:
                assert state is None
            else:
                assert state is not None and int(state.max()) == number
                assert observation.keys.shape[2] == 17

    alone = keepset.Cache(model, recipe, history=True)
    assert torch.equal(generate(model, ids, alone, max_new_tokens=12).sequences, tokens)
    for a, b in zip(alone.events, cache.events, strict=True):
        assert a.keep_set is not None and b.keep_set is not None
        assert same_keep_set(a.keep_set, b.keep_set)
