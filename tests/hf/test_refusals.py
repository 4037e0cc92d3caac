"""Refusals: keepset says in one sentence what is wrong."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import keepset
from tests.hf.models import extended, full, generate, padded_prompt, prompt, same_keep_set, tiny
from tests.hf.test_exactness import GlobalPool
from tests.tiers import TYPECHECK

SIZES: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=200,
)
LENGTH = 30
FEEDS_NEW_TOKENS_ALONE = Version(transformers.__version__) >= Version("5.21")
"""With `prefill_chunk_size`, onto a cache that is not empty; before that transformers fed the past once more."""


@contextmanager
def refusal(words: str) -> Iterator[None]:
    """A KeepsetError with these words whose message is one sentence."""
    with pytest.raises(keepset.KeepsetError, match=words) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    assert not re.search(r"[.!?] [A-Z]", message), message


def random_model(kind: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **options}))


def sharing_model() -> Any:
    return random_model(
        "gemma3n_text",
        num_hidden_layers=3,
        num_kv_shared_layers=1,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        vocab_size_per_layer_input=200,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 3,
    )


def latent_model() -> Any:
    latents = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
    experts = dict(n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32)
    return random_model("deepseek_v3", num_key_value_heads=4, **latents, **experts)


def encoder_decoder() -> Any:
    sizes = dict(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=200)
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: random_model("gemma2"), "soft-caps"),
        (lambda: random_model("gpt_oss", num_local_experts=4), "attention sinks in its softmax"),
        (latent_model, "caches latents"),
        (encoder_decoder, "encoder-decoder"),
        (sharing_model, "shares keys and values between layers"),
        (lambda: random_model("bloom"), "attention interface"),
        (lambda: random_model("minimax", num_local_experts=2), "takes only a cache of its own kind"),
    ],
    ids=["soft-capping", "sinks", "latents", "encoder-decoder", "shared", "no interface", "own cache"],
)
def test_models_of_other_kinds(make: Callable[[], Any], words: str) -> None:
    model = make()
    before = model.config._attn_implementation
    with refusal(words):
        keepset.Cache(model, "tova(keep=12)")
    assert model.config._attn_implementation == before


def test_a_model_that_attends_over_other_values_than_it_caches() -> None:
    model = random_model("diffllama")
    past = keepset.Cache(model, "tova(keep=12)")
    with refusal("attends over other values"):
        generate(model, prompt(1, LENGTH), past, max_new_tokens=2)


def test_a_model_that_attends_over_other_keys_than_it_caches() -> None:
    model = random_model("jetmoe", num_local_experts=4, kv_channels=16)
    past = keepset.Cache(model, "tova(keep=12)")
    with refusal("JetMoeForCausalLM attends over other keys than it caches"):
        generate(model, prompt(1, LENGTH), past, max_new_tokens=2)


def test_a_model_that_is_not_causal() -> None:
    model = random_model("bert")
    past = keepset.Cache(model, "tova(keep=12)")
    with refusal("BertSelfAttention lets tokens see later ones"):
        model(prompt(1, LENGTH), past_key_values=past, use_cache=True)


def test_a_model_that_makes_its_own_mask_in_every_layer() -> None:
    model = random_model("doge")
    past = keepset.Cache(model, "tova(keep=12)")
    with refusal("changes its attention mask in every layer"):
        generate(model, prompt(1, LENGTH), past, max_new_tokens=2)


# --- arguments


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        ("tova", {}, "how much to keep"),
        ("tova(every=8)", {}, "write tova\\(keep=512, every=8\\)"),
        ("h2o(keep=12, every=8)", {}, "attention of the whole prompt, and only there"),
        ("adakv(h2o, keep=12, prefill=False, every=8)", {}, "leave every= out"),
        (
            "int8(match(knorm), keep=12, protect_prompt=True, every=8)",
            {},
            "match does nothing at any other: leave match",
        ),
        ("tova(keep=12)", dict(task_tokens=torch.ones(1, 3, dtype=torch.long)), "not aware of a task"),
        ("tova(keep=12)", dict(prompt_length=0), "prompt_length=0"),
        ("tova(keep=12)", dict(prompt_length=-3), "prompt_length=-3"),
    ],
)
def test_arguments(recipe: str, options: dict[str, Any], words: str) -> None:
    with refusal(words):
        keepset.Cache(tiny("llama"), recipe, **options)


# --- calls


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_implementation(implementation: str) -> None:
    model = tiny("llama")
    past = keepset.Cache(model, "tova(keep=12)")
    model.set_attn_implementation(implementation)
    with refusal("another one ran"):
        generate(model, prompt(1, LENGTH), past, max_new_tokens=2)
    past.reset()
    model.set_attn_implementation("keepset")
    generate(model, prompt(1, LENGTH), past, max_new_tokens=2)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_finished_mask(kind: torch.dtype) -> None:
    model = tiny("llama")
    past = keepset.Cache(model, "tova(keep=12)")
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().to(kind)
    with refusal("two-dimensional"), torch.no_grad():
        model(prompt(1, LENGTH), attention_mask=mask, past_key_values=past)
    past.reset()
    generate(model, prompt(1, LENGTH), past, max_new_tokens=2)


def test_a_mask_that_leaves_the_cache_out() -> None:
    model = tiny("llama")
    ids, mask = padded_prompt([0, 4], LENGTH)
    past = keepset.Cache(model, "tova(keep=12)")
    generate(model, ids, past, mask, max_new_tokens=2)
    with refusal("mask covers 5 tokens"), torch.no_grad():
        model(prompt(2, 5), attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1] * 5]), past_key_values=past)


def test_a_mask_that_is_not_causal() -> None:
    model = random_model("gemma3_text", layer_types=["full_attention"] * 2, use_bidirectional_attention=True)
    past = keepset.Cache(model, "tova(keep=12)")
    with refusal("plain causal attention"), torch.no_grad():
        model(prompt(1, LENGTH), past_key_values=past)


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize(
    ("whole", "how"),
    [
        (True, dict(prefill_chunk_size=5)),
        (True, dict(prefill_chunk_size=50)),
        (True, dict(prompt_lookup_num_tokens=3)),
        (False, dict(prefill_chunk_size=5)),
        (False, dict(prefill_chunk_size=50)),
    ],
)
def test_the_past_fed_twice(whole: bool, how: dict[str, int], padding: int) -> None:
    model = tiny("llama")
    ids, mask = padded_prompt([padding], LENGTH)
    past = keepset.Cache(model, "tova(keep=12)", prompt_length=LENGTH)
    said = generate(model, ids, past, mask, max_new_tokens=4).sequences
    new = prompt(1, 8, 1)
    text = torch.cat([said, new], 1) if whole else torch.cat([said[:, -1:], new], 1)
    mask = extended(mask, said.shape[1] + 8)
    if FEEDS_NEW_TOKENS_ALONE and "prefill_chunk_size" in how:
        expected = generate(model, text, past.fork(), mask, max_new_tokens=3).sequences
        assert torch.equal(generate(model, text, past, mask, max_new_tokens=3, **how).sequences, expected)
        return
    with refusal("is not supported|are not supported"):
        generate(model, text, past, mask, max_new_tokens=3, **how)


def test_drafts_without_a_prompt_length() -> None:
    model = tiny("llama")
    past = keepset.Cache(model, "tova(keep=12)")
    with refusal("prompt_length="):
        generate(model, prompt(1, 8).repeat(1, 4), past, max_new_tokens=8, prompt_lookup_num_tokens=4)
    assert past.get_seq_length() == 0


def test_taking_back_what_was_compressed() -> None:
    model = tiny("llama")
    past = keepset.Cache(model, "tova(keep=12)")
    generate(model, prompt(1, LENGTH), past, max_new_tokens=4)
    past.crop(-3)
    assert past.get_seq_length() == LENGTH
    with refusal("prompt_length="):
        past.crop(-1)


def test_drafts_for_a_method_that_looks_across_layers() -> None:
    model = tiny("llama")
    past = keepset.Cache(model, keepset.Recipe.of(GlobalPool(), keep=12), prompt_length=32)
    with refusal("across layers"):
        generate(model, prompt(1, 8).repeat(1, 4), past, max_new_tokens=8, prompt_lookup_num_tokens=4)


@pytest.mark.parametrize(("recipe", "looks"), [("snapkv(window=5, keep=8)", True), ("knorm(keep=8)", False)])
@torch.no_grad()
def test_tokens_of_an_incomplete_prompt_stay_where_they_were_looked_at(recipe: str, looks: bool) -> None:
    """Their queries would otherwise count at the prompt's end as if they were still there."""
    model, ids = tiny("llama"), prompt(1, 20)
    whole, chunked = keepset.Cache(model, recipe), keepset.Cache(model, recipe, prompt_length=20)
    model(ids, past_key_values=whole)
    model(ids[:, :17], past_key_values=chunked)
    wrong = chunked.fork()
    model(ids[:, :2], past_key_values=wrong)
    if looks:
        with refusal("that is not complete cannot be taken back"):
            wrong.crop(-2)
        wrong = chunked
    else:
        wrong.crop(-2)
    model(ids[:, 17:], past_key_values=wrong)
    assert same_keep_set(wrong.keep_set, whole.keep_set)


@pytest.mark.parametrize(
    ("rows", "covered", "says"), [(2, LENGTH + 3, "and the input has 2"), (1, 3, "mask covers 3 tokens")]
)
@torch.no_grad()
def test_what_is_refused_is_stored_in_no_layer(rows: int, covered: int, says: str) -> None:
    """Nor in the sliding windows that lie before the first layer of keepset's."""
    model, past = tiny("gemma3"), keepset.Cache(tiny("gemma3"), "snapkv(window=5, keep=8)")
    model(prompt(1, LENGTH), past_key_values=past)
    expected = model(prompt(1, 3), past_key_values=past.fork()).logits
    with refusal(says):
        model(prompt(rows, 3), attention_mask=torch.ones(rows, covered), past_key_values=past)
    assert torch.equal(model(prompt(1, 3), past_key_values=past).logits, expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@torch.no_grad()
def test_reordering_half_a_prompt(architecture: str) -> None:
    model = tiny(architecture)
    past = keepset.Cache(model, "h2o(keep=12)", prompt_length=LENGTH)
    model(prompt(2, 10), past_key_values=past)
    whole = past.fork()
    with refusal("before its prompt is complete"):
        past.reorder_cache(torch.tensor([1, 0]))
    ids = prompt(2, LENGTH - 10, 1)
    expected = model(ids, past_key_values=whole).logits
    assert torch.equal(model(ids, past_key_values=past).logits, expected)


@pytest.mark.parametrize("implementation", ["static", "quantized", "dynamic", "offloaded"])
def test_two_caches_at_once(implementation: str) -> None:
    model = tiny("llama")
    past = keepset.Cache(model, "tova(keep=12)")
    with pytest.raises(ValueError, match="only one of the two"):
        generate(model, prompt(1, LENGTH), past, max_new_tokens=2, cache_implementation=implementation)


def test_a_refused_call_leaves_the_model_usable() -> None:
    model = copy.deepcopy(tiny("llama"))
    ids = prompt(1, LENGTH)
    past = keepset.Cache(model, "tova(keep=12)")
    model.set_attn_implementation("sdpa")
    with refusal("another one ran"):
        generate(model, ids, past, max_new_tokens=2)
    expected = full(model, ids, max_new_tokens=4).sequences
    model.set_attn_implementation("keepset")
    assert torch.equal(generate(model, ids, None, max_new_tokens=4).sequences, expected)


def test_a_model_of_windows_only_is_said_to_stay_whole() -> None:
    with pytest.warns(UserWarning, match="compresses nothing"):
        keepset.Cache(tiny("mistral_window"), "knorm(keep=0.5)")


# --- taken for something else


def test_what_is_no_recipe() -> None:
    for wrong in (None, 0.25, ["snapkv"]):
        with refusal("A recipe is a text, and this is"):
            keepset.Recipe.parse(wrong)  # type: ignore[arg-type]
        with refusal("A recipe is a text, and this is"):
            keepset.Cache(tiny("llama"), wrong)  # type: ignore[arg-type]


def test_what_is_no_model() -> None:
    with refusal("takes a model, and this is 'gpt2': load one first"):
        keepset.Cache("gpt2", "knorm(keep=8)")  # type: ignore[arg-type]
    with refusal("Linear is no model of transformers"):
        keepset.Cache(torch.nn.Linear(2, 2), "knorm(keep=8)")  # type: ignore[arg-type]


@pytest.mark.skipif(TYPECHECK, reason="types that are checked while tests run refuse them first")
def test_questions_that_are_no_tokens() -> None:
    model = tiny("llama")
    cache = keepset.Cache(model, "knorm(keep=8)")
    model(prompt(1, LENGTH), past_key_values=cache)
    question = {"input_ids": prompt(1, 3), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    for wrong in ("When?", question, [1, 2], prompt(1, 3)[0], prompt(1, 3).float()):
        with refusal(r"write cache.ask\(\*\*tokenizer\(question"):
            cache.ask(wrong)  # type: ignore[arg-type]
    assert cache.ask(**question)["input_ids"].shape == (1, 3)


@pytest.mark.parametrize(("length", "words"), [(LENGTH, "for another prompt make a new cache"), (9, "goes no further")])
def test_a_cache_that_serves_another_conversation(length: int, words: str) -> None:
    model = tiny("llama")
    cache = keepset.Cache(model, "knorm(keep=8)")
    generate(model, prompt(1, LENGTH), cache, max_new_tokens=3)
    with refusal(words):
        generate(model, prompt(1, length), cache, max_new_tokens=3)


def test_attention_weights_are_not_there() -> None:
    model = tiny("llama")
    cache = keepset.Cache(model, "knorm(keep=8)")
    with refusal("output_attentions=True asks for weights that keepset's attention never holds"):
        model(prompt(1, LENGTH), past_key_values=cache, output_attentions=True)


def test_a_cache_tells_what_it_holds() -> None:
    model = tiny("llama")
    cache = keepset.Cache(model, "knorm(keep=0.25)")
    assert repr(cache) == "Cache(knorm(keep=0.25): empty)"
    model(prompt(1, 40), past_key_values=cache)
    full_bytes = 40 * sum(2 * layer.store.kv_heads * 16 * 4 for layer in cache.kept_layers.values())
    assert cache.nbytes_full == full_bytes
    sizes = f"{cache.nbytes / 1e6:.1f} MB of {full_bytes / 1e6:.1f}"
    assert repr(cache) == f"Cache(knorm(keep=0.25): 10 of 40 tokens, {sizes})"


def test_it_tells_places_for_tokens_to_come_apart() -> None:
    model = tiny("llama")
    cache = keepset.Cache(model, "knorm(keep=2000, every=800)")
    model(prompt(1, 4000), past_key_values=cache)
    model(prompt(1, 1), past_key_values=cache)
    entry = sum(2 * layer.store.kv_heads * 16 * 4 for layer in cache.kept_layers.values())
    held = 2001 * (entry + sum(4 * layer.store.kv_heads for layer in cache.kept_layers.values()))  # with positions
    beside = cache.nbytes - held
    sizes = f"{held / 1e6:.1f} MB of {4001 * entry / 1e6:.1f}, {beside / 1e6:.1f} MB more for what comes"
    assert beside >= 50_000
    assert repr(cache) == f"Cache(knorm(keep=2000, every=800): 2001 of 4001 tokens, {sizes})"
