"""Models whose layers hold recurrent or convolutional states, beside attention or instead of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import keepset
from keepset import Recipe
from keepset.hf.prompt_session import PromptSession
from keepset.lab.memory import dynamic_nbytes, growing_nbytes
from tests.hf.contract.builds import build
from tests.hf.damage import File
from tests.hf.models import HYBRIDS, full, generate, oracle_gap, padded_prompt, prompt, refusal, tiny

LENGTH = 30
by_model = pytest.mark.parametrize("architecture", [*HYBRIDS, "lfm2"])


@pytest.mark.cross
@by_model
@pytest.mark.parametrize(
    "recipe", ["adakv(snapkv(window=5, kernel=3), keep=12)", "prompt_queries(keep=12)", "reread(keep=14)"]
)
def test_attention_is_compressed_beside_states(architecture: str, recipe: str) -> None:
    model, ids = tiny(architecture), prompt(2, LENGTH)
    past = keepset.Cache(model, recipe)
    output = generate(model, ids, past, max_new_tokens=5)
    heads = sum(layer.store.kv_heads for layer in past.managed_layers.values())
    assert past.keep_set.entries == 2 * heads * (14 if "reread" in recipe else 12)
    if architecture == "zamba2":  # whose layers share one attention module, which the oracle asks for its layer
        for module in model.modules():
            if type(module).__name__ == "Zamba2Attention":
                module.register_forward_pre_hook(note_layer, with_kwargs=True)
    assert oracle_gap(model, past, output, torch.ones_like(ids)) < 5e-3  # states add up rounding


def note_layer(module: Any, args: Any, kwargs: Any) -> None:
    module.layer_idx = kwargs.get("layer_idx", args[1] if len(args) > 1 else module.layer_idx)


@by_model
@pytest.mark.parametrize(
    ("recipe", "padding", "new", "beams", "events"),
    [
        ("snapkv(window=5, kernel=3, keep=99, every=4)", [0, 7], 12, 1, 3),
        ("reread(keep=1.0)", [0, 0], 6, 1, 1),
        ("knorm(keep=1.0)", [0, 0], 5, 2, 1),
    ],
    ids=["padding and events", "a second pass changes no state", "beams"],
)
def test_its_own_tokens_if_all_stays(
    architecture: str, recipe: str, padding: list[int], new: int, beams: int, events: int
) -> None:
    model, (ids, mask) = tiny(architecture), padded_prompt(padding, LENGTH)
    past, options = keepset.Cache(model, recipe), dict(max_new_tokens=new, num_beams=beams)
    said = generate(model, ids, past, mask, **options).sequences
    assert len(past.events) == events and torch.equal(said, full(model, ids, mask, **options).sequences)


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
        answer = past.ask(questions)
        options = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
        assert torch.equal(model.generate(**answer, max_new_tokens=5, **options), expected)


def test_bytes_of_states_are_counted() -> None:
    model, ids = tiny("falcon_h1"), prompt(1, LENGTH)
    past, whole = keepset.Cache(model, "knorm(keep=12)"), DynamicCache(config=model.config)
    generate(model, ids, past, max_new_tokens=1)
    states = [state for layer in past.layers for state in (layer.conv_states[0], layer.recurrent_states[0])]
    fixed, entries = (
        sum(state.nbytes for state in states),
        sum(layer.store.nbytes for layer in past.managed_layers.values()),
    )
    assert past.nbytes == entries + fixed == past.nbytes_fixed + entries
    assert f" MB allocated, {fixed / 1e6:.1f} of them in windows and states)" in repr(past)
    generate(model, ids, whole, max_new_tokens=1)
    assert past.nbytes_full == dynamic_nbytes(whole) == growing_nbytes(whole) + fixed
    session = PromptSession(model, ids)
    compressed = session.compress(Recipe.parse("knorm(keep=12)"))
    assert compressed.kv_bytes_full == past.nbytes_full and compressed.cache.nbytes == past.nbytes


@by_model
@torch.no_grad()
def test_a_shared_prefill_brings_its_states(architecture: str) -> None:
    model, ids, new = tiny(architecture), prompt(1, LENGTH), prompt(1, 4, seed=1)
    past = keepset.Cache(model, "knorm(keep=12)")
    model(ids, past_key_values=past, use_cache=True)
    shared = PromptSession(model, ids).compress(Recipe.parse("knorm(keep=12)")).cache
    expected = model(new, past_key_values=past, use_cache=True).logits
    assert torch.equal(model(new, past_key_values=shared, use_cache=True).logits, expected)


@pytest.mark.few(3)
@pytest.mark.cross
@pytest.mark.parametrize("architecture", ["nemotron_h", *HYBRIDS, "lfm2"])
@pytest.mark.parametrize("recipe", ["snapkv(window=5, kernel=3, keep=12)", "adakv(knorm, keep=12, every=4)"])
@torch.no_grad()
def test_a_saved_context_goes_on_with_its_states(architecture: str, recipe: str, tmp_path: Path) -> None:
    """Some layers of a cache may hold nothing, as those with experts of nemotron_h."""
    model = build(architecture) if architecture == "nemotron_h" else tiny(architecture)
    ids, mask = padded_prompt([0, 7], LENGTH)
    past = keepset.Cache(model, recipe)
    generate(model, ids, past, mask, max_new_tokens=3)  # states of decoded tokens, too
    past.save(tmp_path / "context")
    loaded = keepset.Cache.load(tmp_path / "context", model)
    assert loaded.nbytes == past.fork().nbytes and loaded.nbytes_fixed == past.nbytes_fixed > 0
    questions = prompt(2, 4, seed=1)
    options: dict[str, Any] = dict(do_sample=False, pad_token_id=0, eos_token_id=None, max_new_tokens=6)
    expected = model.generate(**past.ask(questions), **options)
    for cache in (loaded, loaded.fork()):
        assert torch.equal(model.generate(**cache.ask(questions), **options), expected)
    with refusal("cannot take .*tokens"):
        loaded.crop(-1)


@torch.no_grad()
def test_states_of_other_sizes_or_none_are_damage(tmp_path: Path) -> None:
    model, path = tiny("lfm2"), tmp_path / "context"
    past = keepset.Cache(model, "knorm(keep=12)")
    model(prompt(1, LENGTH), past_key_values=past, use_cache=True)
    past.save(path)
    file = File.of(path.read_bytes())
    name = "layers.0.states.convolution.0"
    dtype, (one, width, size), _ = file.tensors[name]
    wider = {**file.tensors, name: (dtype, [one, width, size + 1], bytes(4 * width * (size + 1)))}
    for tensors in wider, {each: tensor for each, tensor in file.tensors.items() if ".states." not in each}:
        path.write_bytes(replace(file, tensors=tensors, sealed=True).content)
        with refusal("is damaged"):
            keepset.Cache.load(path, model)


@pytest.mark.parametrize("kind", ["jamba", "zamba"])
@torch.no_grad()
def test_mixers_that_take_one_token_after_a_state_get_one_after_another(kind: str) -> None:
    """transformers' mixers of these types ignore their state if several tokens come."""
    model, ids = build(kind), prompt(2, LENGTH)
    model.set_attn_implementation("eager")
    expected, text = model(ids, use_cache=False).logits[:, -6:], ids[:, :-6]
    past = keepset.Cache(model, "knorm(keep=1.0)")
    model(text, past_key_values=past, use_cache=True)
    copied = copy.deepcopy(model)  # whose mixers are mended as well
    for each in (model, copied, model):
        logits = each(ids[:, -6:], past_key_values=past.fork(), use_cache=True).logits
        assert (logits - expected).abs().max() < 1e-3
    in_parts = keepset.Cache(model, "knorm(keep=1.0)", prompt_length=LENGTH)
    said = generate(model, ids, in_parts, max_new_tokens=1, prefill_chunk_size=10).logits[0]
    assert (said - expected[:, -1]).abs().max() < 1e-3
    own = DynamicCache(config=model.config)
    model(text, past_key_values=own, use_cache=True)
    assert (model(ids[:, -6:], past_key_values=own, use_cache=True).logits - expected).abs().max() < 1e-3


@pytest.mark.few(2)
@by_model
@torch.no_grad()
def test_padding_behind_tokens_is_refused(architecture: str) -> None:
    """It would change states, as in a model without keepset."""
    model, ids = tiny(architecture), prompt(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    with refusal("Padding behind tokens changes the states"):
        generate(model, ids, keepset.Cache(model, "knorm(keep=12)"), mask, max_new_tokens=1)
    past = keepset.Cache(model, "knorm(keep=12)")
    generate(model, ids, past, mask.flip(1), max_new_tokens=1)
    shorter = torch.tensor([[1, 1, 1], [0, 1, 1]])
    with refusal("ask questions of different lengths one by one"):
        model.generate(**past.ask(prompt(2, 3), shorter), max_new_tokens=1)
    generated = model.generate(**past.ask(prompt(2, 3), torch.ones_like(shorter)), max_new_tokens=1, pad_token_id=0)
    assert generated.shape == (2, 4)
