"""The perplexity of a prompt's newest tokens: from the model's own logits, without a second forward."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset.core.feature import Feature, Needs
from keepset.core.features.attention import SecondPass
from keepset.core.features.runtime_features import Perplexity
from keepset.core.observation import Observation
from keepset.hf.prompt_session import Recorder
from keepset.kernels.columns import ColumnStatistic
from tests.hf.looking import Looking, looking
from tests.hf.models import generate, padded_prompt, prompt, refusal, same_keep_set, tiny

LENGTH, PADDING = 30, [0, 7, 24]
WINDOWS = (1, 8)


PERPLEXITIES = tuple(map(Perplexity, WINDOWS))


def cache_of(model: Any, *features: Feature[Any], **options: Any) -> keepset.Cache:
    Looking.shown.clear()
    return keepset.Cache(model, looking(*PERPLEXITIES, *features), **options)


@torch.no_grad()
def expected(model: Any, ids: Tensor, window: int) -> float:
    """Equation 13 for one request without padding, from transformers' own logits of the whole prompt."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    logits = plain(ids[None], use_cache=False).logits[0].double()
    losses = [-float(logits[at - 1].log_softmax(-1)[ids[at]]) for at in range(max(1, len(ids) - window), len(ids))]
    return math.exp(sum(losses) / len(losses)) if losses else math.inf


def check(model: Any, ids: Tensor, mask: Tensor, tolerance: float = 1e-4) -> None:
    assert list(Looking.shown) == list(range(model.config.num_hidden_layers))
    for observation in Looking.shown.values():
        for window in WINDOWS:
            own = [expected(model, row[real.bool()], window) for row, real in zip(ids, mask, strict=True)]
            torch.testing.assert_close(observation[Perplexity(window)], torch.tensor(own), rtol=tolerance, atol=0.0)


@pytest.mark.cross
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("chunk", [None, 11, 8, 1], ids=["whole", "chunks", "chunks_of_a_window", "single"])
def test_it_is_that_of_the_models_own_logits(name: str, chunk: int | None) -> None:
    model, (ids, mask) = tiny(name), padded_prompt(PADDING, LENGTH)
    cache = cache_of(model, prompt_length=LENGTH if chunk else None)
    generate(model, ids, cache, mask, max_new_tokens=2, prefill_chunk_size=chunk)
    check(model, ids, mask)


@pytest.mark.cross
@pytest.mark.parametrize("asked", [0, 1, 3, 20, 100, torch.tensor([2, 29]), None], ids=str)
@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_callers_get_the_logits_that_they_asked_for(asked: Any, side: str) -> None:
    model, ids = tiny("llama"), prompt(2, LENGTH)
    mask = torch.ones_like(ids)
    if side != "none":
        mask[1, :9] = 0
        mask = mask if side == "left" else mask.flip(-1)
    options = dict(attention_mask=mask, **({} if asked is None else dict(logits_to_keep=asked)))
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        plain = model(ids, **options, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
        expected = model(
            ids, past_key_values=cache_of(model), **options, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)
        ).logits
    assert expected.shape == plain.shape
    if side == "none":
        torch.testing.assert_close(expected, plain, rtol=1e-4, atol=1e-4)
    check(model, ids, mask)


@pytest.mark.parametrize(("length", "scale"), [(1, 1.0), (2, 1.0), (8, 1.0), (9, 1.0), (LENGTH, 0.25)])
def test_short_prompts_and_logits_that_the_model_scales(length: int, scale: float) -> None:
    """Nothing foretells the first token."""
    model, ids = copy.deepcopy(tiny("llama")), prompt(2, length)
    model.lm_head.register_forward_hook(lambda module, args, output: output * scale)
    generate(model, ids, cache_of(model), max_new_tokens=1)
    check(model, ids, torch.ones_like(ids))


def test_with_a_second_pass_and_in_a_shared_prefill() -> None:
    model, ids = tiny("llama"), prompt(1, LENGTH)
    again = SecondPass(frozenset({ColumnStatistic.SUM}))
    generate(model, ids, cache_of(model, again), max_new_tokens=1)
    check(model, ids, torch.ones_like(ids))
    assert all(observation[again] for observation in Looking.shown.values())
    recorder = Recorder(model, Needs(*PERPLEXITIES))
    recorder.prefill(ids)
    for observation in recorder.observations:
        assert torch.equal(observation[Perplexity(8)], Looking.shown[0][Perplexity(8)])


def test_a_fork_in_the_middle_of_a_prompt_goes_its_own_way() -> None:
    model, ids, another = tiny("llama"), prompt(1, LENGTH), prompt(1, LENGTH, seed=3)
    cache = cache_of(model, prompt_length=LENGTH)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache, logits_to_keep=1)
        twin = cache.fork()
        model(another[:, 20:], past_key_values=twin, logits_to_keep=1)
        mixed = torch.cat([ids[:, :20], another[:, 20:]], 1)
        check(model, mixed, torch.ones_like(ids))
        model(ids[:, 20:], past_key_values=cache, logits_to_keep=1)
    check(model, ids, torch.ones_like(ids))
    assert twin.keep_set is not None and same_keep_set(twin.keep_set, cache.keep_set)  # the newest four of each


def test_what_cannot_be_told_is_refused() -> None:
    model, ids = tiny("llama"), prompt(1, LENGTH)
    with refusal("call the model, not only its decoder"):
        model.get_decoder()(ids, past_key_values=cache_of(model))
    with refusal("Embeddings have no perplexity"):
        model(inputs_embeds=model.get_input_embeddings()(ids), past_key_values=cache_of(model))
    with refusal("with return_dict=True"):
        model(ids, past_key_values=cache_of(model), return_dict=False)
    with refusal("the prompt's perplexity, which only exists at the prompt's end: leave every= out"):
        keepset.Cache(model, looking(*PERPLEXITIES, every=8))
    with refusal(r"give Observation\(features=\{Perplexity\(tokens=8\): ...\}\)"):
        Observation(keys=torch.zeros(1, 1, 1, 1), values=torch.zeros(1, 1, 1, 1))[Perplexity(8)]
