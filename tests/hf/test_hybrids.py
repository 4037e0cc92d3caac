"""Models whose layers hold recurrent or convolutional states, beside attention or instead of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import keepset
from tests.hf.models import HYBRIDS, full, generate, oracle_gap, padded_prompt, prompt, tiny

LENGTH = 30
by_model = pytest.mark.parametrize("architecture", [*HYBRIDS, "lfm2"])


@by_model
@pytest.mark.parametrize(
    "recipe", ["adakv(snapkv(window=5, kernel=3), keep=12)", "prompt_queries(keep=12)", "reread(keep=14)"]
)
def test_attention_is_compressed_beside_states(architecture: str, recipe: str) -> None:
    model, ids = tiny(architecture), prompt(2, LENGTH)
    past = keepset.Cache(model, recipe)
    output = generate(model, ids, past, max_new_tokens=5)
    heads = sum(layer.store.kv_heads for layer in past.kept_layers.values())
    assert past.keep_set.entries == 2 * heads * (14 if "reread" in recipe else 12)
    if architecture == "zamba2":  # whose layers share one attention module, which the oracle asks for its layer
        for module in model.modules():
            if type(module).__name__ == "Zamba2Attention":
                module.register_forward_pre_hook(note_layer, with_kwargs=True)
    assert oracle_gap(model, past, output, torch.ones_like(ids)) < 5e-3  # states add up rounding


def note_layer(module: Any, args: Any, kwargs: Any) -> None:
    module.layer_idx = kwargs.get("layer_idx", args[1] if len(args) > 1 else module.layer_idx)


@by_model
def test_padded_prompts_and_events_while_decoding(architecture: str) -> None:
    model = tiny(architecture)
    ids, mask = padded_prompt([0, 7], LENGTH)
    past = keepset.Cache(model, "snapkv(window=5, kernel=3, keep=99, every=4)")
    said = generate(model, ids, past, mask, max_new_tokens=12).sequences
    assert len(past.events) == 3
    assert torch.equal(said, full(model, ids, mask, max_new_tokens=12).sequences)


@by_model
@torch.no_grad()
def test_a_second_pass_changes_no_state(architecture: str) -> None:
    model, ids = tiny(architecture), prompt(2, LENGTH)
    past = keepset.Cache(model, "reread(keep=1.0)")
    said = generate(model, ids, past, max_new_tokens=6).sequences
    assert torch.equal(said, full(model, ids, max_new_tokens=6).sequences)


@by_model
@torch.no_grad()
def test_several_questions_about_one_text(architecture: str) -> None:
    model, ids, questions = tiny(architecture), prompt(1, LENGTH), prompt(3, 1, seed=1)
    past = keepset.Cache(model, "knorm(keep=1.0)")
    model(ids, past_key_values=past, use_cache=True)
    whole = torch.cat([ids.expand(3, -1), questions], 1)
    expected = full(model, whole, max_new_tokens=5).sequences[:, LENGTH:]
    model.set_attn_implementation("keepset")
    for _ in range(2):  # the cache stays as it is
        asked = past.ask(questions)
        options = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
        assert torch.equal(model.generate(**asked, max_new_tokens=5, **options), expected)


@by_model
def test_beams(architecture: str) -> None:
    model, ids = tiny(architecture), prompt(2, LENGTH)
    expected = full(model, ids, max_new_tokens=5, num_beams=2).sequences
    past = keepset.Cache(model, "knorm(keep=1.0)")
    assert torch.equal(generate(model, ids, past, max_new_tokens=5, num_beams=2).sequences, expected)


@torch.no_grad()
def test_some_requests_of_a_batch_go_on() -> None:
    model, ids, new = tiny("falcon_h1"), prompt(3, LENGTH), prompt(3, 1, seed=1)
    past = keepset.Cache(model, "knorm(keep=12)")
    model(ids, past_key_values=past, use_cache=True)
    fewer = past.fork()
    fewer.batch_select_indices(torch.tensor([True, False, True]))
    expected = model(new, past_key_values=past, use_cache=True).logits[[0, 2]]
    torch.testing.assert_close(model(new[[0, 2]], past_key_values=fewer, use_cache=True).logits, expected)


def test_bytes_of_states_are_counted() -> None:
    model = tiny("falcon_h1")
    past = keepset.Cache(model, "knorm(keep=12)")
    generate(model, prompt(1, LENGTH), past, max_new_tokens=1)
    states = [each for layer in past.layers for each in (layer.conv_states[0], layer.recurrent_states[0])]
    entries = sum(layer.store.nbytes for layer in past.kept_layers.values())
    assert past.nbytes == entries + sum(state.nbytes for state in states)
