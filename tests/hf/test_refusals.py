"""Refusals: keepset says in one sentence what is wrong, and changes nothing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig

import keepset
from keepset.core.features.moments import HiddenMoments, QueryMoments
from keepset.core.features.runtime_features import Perplexity
from tests.hf.looking import looking
from tests.hf.models import (
    GPU,
    extended,
    full,
    generate,
    padded_prompt,
    prompt,
    refusal,
    tiny,
    untrained,
    with_random_weights,
)
from tests.tiers import TYPECHECK

LENGTH = 30
FEEDS_NEW_TOKENS_ALONE = Version(transformers.__version__) >= Version("5.21")
"""With `prefill_chunk_size`, onto a cache that is not empty; before that transformers fed the past once more."""


NO_HEADS = dict(num_attention_heads=None, num_key_value_heads=None, head_dim=None)


def encoder_decoder() -> Any:
    sizes = dict(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=200)
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes))


NOTHING_TO_COMPRESS = "no layer that caches the whole text, .* so keepset has nothing to compress"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (encoder_decoder, "encoder-decoder"),
        (lambda: untrained("bloom"), "attention interface"),
        (lambda: untrained("minimax", num_local_experts=2), "takes only a cache of its own kind"),
        (lambda: torch.compile(copy.deepcopy(tiny("llama")), backend="eager"), "or compile it in place"),
        (lambda: untrained("mamba", **NO_HEADS), NOTHING_TO_COMPRESS),
        (lambda: untrained("falcon_mamba", **NO_HEADS), NOTHING_TO_COMPRESS),
        (lambda: "gpt2", "takes a model, and this is 'gpt2': load one first"),
        (lambda: torch.nn.Linear(2, 2), "Linear is no model of transformers"),
    ],
)
def test_models_of_other_kinds(make: Callable[[], Any], words: str) -> None:
    model = make()
    before = getattr(model, "config", None) and model.config._attn_implementation
    with refusal(words):
        keepset.Cache(model, "tova(keep=12)")
    if words != NOTHING_TO_COMPRESS:
        assert before == (getattr(model, "config", None) and model.config._attn_implementation)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("diffllama", {}, "attends over other values"),
        (
            "jetmoe",
            dict(num_local_experts=4, kv_channels=16),
            "JetMoeForCausalLM attends over other keys than it caches",
        ),
        ("bert", {}, "BertSelfAttention lets tokens see later ones"),
        ("doge", {}, "changes its attention mask in every layer"),
    ],
)
@torch.no_grad()
def test_models_whose_attention_is_found_to_be_another(kind: str, options: dict[str, Any], words: str) -> None:
    model = untrained(kind, **options)
    past = keepset.Cache(model, "tova(keep=12)")
    with refusal(words):
        model(prompt(1, LENGTH), past_key_values=past, use_cache=True)


@pytest.mark.parametrize("states", [False, True])
def test_a_model_of_windows_only_is_said_to_stay_whole(states: bool) -> None:
    sizes = dict(attention_window_size=16, lru_width=64, num_hidden_layers=3)
    model = untrained("recurrent_gemma", **sizes) if states else tiny("mistral_window")
    with pytest.warns(
        UserWarning, match="only sliding windows or states of a fixed size, so keepset compresses nothing"
    ):
        past = keepset.Cache(model, "qfilter(stats='absent', keep=8)")
    with refusal("only sliding windows or states of a fixed size"):
        past.require_prompt()


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        ("tova", {}, "how much to keep"),
        ("tova(every=8)", {}, "write tova\\(keep=512, every=8\\)"),
        ("h2o(keep=12, every=8)", {}, "attention of the whole prompt, which only exists at"),
        ("adakv(h2o, keep=12, prefill=False, every=8)", {}, "leave every= out"),
        ("prompt_queries(keep=20, every=8)", {}, "leave every= out"),
        ("gvote(every=8)", {}, "looks at moments over the whole prompt"),
        (looking(HiddenMoments(0), every=8), {}, "leave every= out"),
        (looking(QueryMoments(0), every=8), {}, "leave every= out"),
        (
            "int8(match(knorm, window=0), keep=12, protect_prompt=True, every=8)",
            {},
            "match does nothing at any other: leave match",
        ),
        ("expected_attention(buffer=-1, keep=8)", {}, "buffer=-1 is out of range"),
        ("tova(keep=12)", dict(task_tokens=torch.ones(1, 3, dtype=torch.long)), "not aware of a task"),
        ("tova(keep=12)", dict(prompt_length=0), "prompt_length=0"),
        ("tova(keep=12)", dict(prompt_length=-3), "prompt_length=-3"),
        (0.25, {}, "A recipe is a text, and this is"),
    ],
)
def test_arguments(recipe: Any, options: dict[str, Any], words: str) -> None:
    with refusal(words):
        keepset.Cache(tiny("llama"), recipe, **options)


# --- calls


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_implementation(implementation: str) -> None:
    """A refused call leaves the model usable, and a cache that is reset, too."""
    model, ids = copy.deepcopy(tiny("llama")), prompt(1, LENGTH)
    past = keepset.Cache(model, "tova(keep=12)")
    model.set_attn_implementation(implementation)
    with refusal("another one ran"):
        generate(model, ids, past, max_new_tokens=2)
    expected = full(model, ids, max_new_tokens=4).sequences
    model.set_attn_implementation("keepset")
    assert torch.equal(generate(model, ids, None, max_new_tokens=4).sequences, expected)
    past.reset()
    generate(model, ids, past, max_new_tokens=2)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_finished_mask(kind: torch.dtype) -> None:
    model, past = tiny("llama"), keepset.Cache(tiny("llama"), "tova(keep=12)")
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().to(kind)
    with refusal("two-dimensional"), torch.no_grad():
        model(prompt(1, LENGTH), attention_mask=mask, past_key_values=past)
    past.reset()
    generate(model, prompt(1, LENGTH), past, max_new_tokens=2)


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize(
    ("whole", "how"),
    [
        *((whole, dict(prefill_chunk_size=size)) for whole in (True, False) for size in (5, 50)),
        (True, dict(prompt_lookup_num_tokens=3)),
    ],
)
def test_the_past_fed_twice(whole: bool, how: dict[str, int], padding: int) -> None:
    model = tiny("llama")
    ids, mask = padded_prompt([padding], LENGTH)
    past = keepset.Cache(model, "tova(keep=12)", prompt_length=LENGTH)
    said = generate(model, ids, past, mask, max_new_tokens=4).sequences
    text = torch.cat([said if whole else said[:, -1:], prompt(1, 8, 1)], 1)
    mask = extended(mask, said.shape[1] + 8)
    if FEEDS_NEW_TOKENS_ALONE and "prefill_chunk_size" in how:
        expected = generate(model, text, past.fork(), mask, max_new_tokens=3).sequences
        assert torch.equal(generate(model, text, past, mask, max_new_tokens=3, **how).sequences, expected)
        return
    with refusal("is not supported|are not supported"):
        generate(model, text, past, mask, max_new_tokens=3, **how)


@pytest.mark.parametrize(
    ("recipe", "prompt_length", "words"),
    [
        ("tova(keep=12)", None, "prompt_length="),
        ("snapkv(window=5, keep=12, every=8)", 32, "Assisted generation cannot go with compression while decoding"),
        ("pool(knorm, keep=12)", 32, "across layers"),
        ("second_pass(keep=8)", 32, "leave assisted generation out"),
        (looking(Perplexity(8)), 32, "together with drafted tokens"),
    ],
)
def test_drafts_together_with_the_prompt(recipe: Any, prompt_length: int | None, words: str) -> None:
    past = keepset.Cache(tiny("llama"), recipe, prompt_length=prompt_length)
    with refusal(words):
        generate(tiny("llama"), prompt(1, 8).repeat(1, 4), past, max_new_tokens=8, prompt_lookup_num_tokens=4)


@pytest.mark.parametrize(("length", "words"), [(LENGTH, "for another prompt make a new cache"), (9, "has no more")])
def test_a_cache_that_serves_another_conversation(length: int, words: str) -> None:
    model, cache = tiny("llama"), keepset.Cache(tiny("llama"), "knorm(keep=8)")
    generate(model, prompt(1, LENGTH), cache, max_new_tokens=3)
    with refusal(words):
        generate(model, prompt(1, length), cache, max_new_tokens=3)


def test_attention_weights_are_not_there() -> None:
    cache = keepset.Cache(tiny("llama"), "knorm(keep=8)")
    with refusal("output_attentions=True asks for weights that keepset's attention never holds"):
        tiny("llama")(prompt(1, LENGTH), past_key_values=cache, output_attentions=True)


@pytest.mark.skipif(TYPECHECK, reason="types that are checked while tests run refuse them first")
def test_questions_that_are_no_tokens() -> None:
    cache = keepset.Cache(tiny("llama"), "knorm(keep=8)")
    tiny("llama")(prompt(1, LENGTH), past_key_values=cache)
    question = {"input_ids": prompt(1, 3), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    for wrong in ("When?", question, [1, 2], prompt(1, 3)[0], prompt(1, 3).float()):
        with refusal(r"write cache.ask\(\*\*tokenizer\(question"):
            cache.ask(wrong)  # type: ignore[arg-type]
    assert cache.ask(**question)["input_ids"].shape == (1, 3)


# --- all layers or none


@torch.no_grad()
def following(model: Any, cache: keepset.Cache) -> Tensor:
    """Return what a few more tokens predict on a fork."""
    ids = prompt(len(cache.progress.tokens), 4, 3)
    return model(ids, past_key_values=cache.fork(), use_cache=True).logits


def fed(model: Any, cache: keepset.Cache, rows: int, covered: int) -> None:
    model(prompt(rows, 3), attention_mask=torch.ones(rows, covered), past_key_values=cache)


@pytest.mark.few
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda cache, model: cache.crop(-2), "cannot take back 2 tokens, so no layer has"),
        (lambda cache, model: cache.crop(LENGTH), "cannot take back 3 tokens, so no layer has"),
        (
            lambda cache, model: cache.crop(-9),
            "Only the 3 tokens after the newest compression can be taken back",
        ),
        (lambda cache, model: cache.reorder_cache(torch.tensor([1, 2])), "indices from 0 to 1"),
        (lambda cache, model: cache.batch_select_indices(torch.tensor([-3])), "indices from 0 to 1"),
        (lambda cache, model: cache.batch_select_indices(torch.tensor([False, False])), "at least one of them"),
        (lambda cache, model: cache.batch_select_indices(torch.tensor([True])), "a mask of 2"),
        (lambda cache, model: cache.batch_repeat_interleave(0), "at least one of them"),
        (lambda cache, model: cache.batch_repeat_interleave(-1), "at least one of them"),
        (lambda cache, model: fed(model, cache, 3, LENGTH + 6), "and the input has 3"),
        (lambda cache, model: fed(model, cache, 2, 3), "mask covers 3 tokens"),
    ],
)
@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_a_refused_change_changes_nothing(name: str, change: Callable[[keepset.Cache, Any], None], words: str) -> None:
    if name == "lfm2" and words == "and the input has 3":
        pytest.skip("its convolutions come before keepset's layers")
    model, cache = tiny(name), keepset.Cache(tiny(name), "snapkv(window=4, kernel=3, keep=12)")
    generate(model, prompt(2, LENGTH), cache, max_new_tokens=4)
    expected, tokens = following(model, cache), list(cache.progress.tokens)
    with refusal(words), torch.no_grad():
        change(cache, model)
    assert cache.progress.tokens == tokens and cache.get_seq_length() == LENGTH + 3
    assert torch.equal(following(model, cache), expected)


def test_an_empty_cache_has_nothing_to_take_back() -> None:
    cache = keepset.Cache(tiny("llama"), "knorm(keep=12)")
    with refusal("The cache is empty"):
        cache.crop(-3)
    cache.crop(3)


@pytest.mark.parametrize("write", [pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())])
def test_a_cache_is_saved_and_not_pickled(write: Callable[[keepset.Cache], None]) -> None:
    with refusal("write it with cache.save"):
        write(keepset.Cache(tiny("llama"), "knorm(keep=12)"))


@pytest.mark.parametrize("options", [dict(use_cache=False), dict(generation_config=GenerationConfig(use_cache=False))])
def test_a_cache_that_is_not_to_be_used(options: dict[str, Any]) -> None:
    with refusal("use_cache=False"):
        tiny("llama").generate(prompt(1, 5), past_key_values=keepset.Cache(tiny("llama"), "knorm(keep=12)"), **options)


@pytest.mark.skipif(GPU, reason="dynamic quantization is for CPUs")
@pytest.mark.filterwarnings("ignore:torch.(ao.quantization|quantize_per_tensor).*deprecated")
def test_activations_that_are_quantized_together_are_named() -> None:
    """Keys need no query, so methods that look at them run."""
    model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(tiny("llama")), {torch.nn.Linear}, dtype=torch.qint8)
    past = keepset.Cache(model, "knorm(keep=1.0)")
    said, expected = (generate(model, prompt(1, LENGTH), cache, max_new_tokens=3).sequences for cache in (past, None))
    assert torch.equal(said, expected)
    with refusal("rounds a token's query by what else is in the call"):
        generate(
            model, prompt(1, LENGTH), keepset.Cache(model, "expected_attention(future=8, keep=12)"), max_new_tokens=1
        )


# --- a model that rotates longer texts in another way, and then leaves its cache

SHORT = 64


def rotated_by_length(kind: str) -> Any:
    """A tiny model whose rotations change once a text is longer than `SHORT`."""
    factors = {"short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    # PhiMoE's own attributes.
    factors |= {"short_mscale": 1.1, "long_mscale": 1.2} if kind == "phimoe" else {}
    rotation = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SHORT, **factors}
    lengths = dict(max_position_embeddings=256, original_max_position_embeddings=SHORT, sliding_window=None)
    experts = dict(num_local_experts=2, num_experts_per_tok=2) if kind == "phimoe" else {}
    return with_random_weights(untrained(kind, rope_parameters=rotation, **lengths, **experts))


@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_a_text_whose_rotations_change_stays_in_its_cache_or_is_refused(kind: str) -> None:
    model = rotated_by_length(kind)

    def generated(ids: Tensor, new: int, past: keepset.Cache) -> Tensor:
        return generate(model, ids, past, max_new_tokens=new).sequences

    for length, new in ((SHORT - 4, 5), (SHORT + 1, 8)):  # of which 64 and 72 tokens are fed
        past, ids = keepset.Cache(model, "knorm(keep=1.0)"), prompt(1, length)
        said = generated(ids, new, past)
        with torch.no_grad():
            logits = model(said[:, :-1], use_cache=False).logits
        assert torch.equal(logits[0, length - 1 :].argmax(-1), said[0, length:])
        assert past.get_seq_length() == length + new - 1
    ids, past = prompt(1, SHORT - 4), keepset.Cache(model, "knorm(keep=12)")
    with refusal(
        "and 65 are to be fed: use at most max_new_tokens=5, or begin a new cache with a text of more than 64"
    ):
        generated(ids, 6, past)
    with refusal("use at most max_new_tokens=5"):  # 20 is the default
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=past, pad_token_id=0)
    said = generated(ids, 2, past)
    question = prompt(1, 5)
    with refusal("and 66 are to be fed: begin a new cache"):
        model.generate(**past.ask(question), max_new_tokens=1)
    with refusal("and 66 are to be fed: begin a new cache"):
        model(question, past_key_values=past)
    assert model.generate(**past.ask(question[:, :3]), max_new_tokens=1).shape == (1, 4)
    assert generated(said, 1, past).shape == (1, SHORT - 1)


@torch.no_grad()
def test_a_window_that_recorded_its_past_is_taken_back_as_far_as_it_did() -> None:
    model, ids = tiny("gemma3"), prompt(1, 52)
    cache = keepset.Cache(model, "knorm(keep=1.0)")
    model(ids[:, :40], past_key_values=cache)
    cache.activate_past_recording()
    model(ids[:, 40:44], past_key_values=cache)
    expected = following(model, cache)
    model(ids[:, 44:], past_key_values=cache)
    cache.crop(44)
    assert torch.allclose(following(model, cache), expected, atol=1e-5)
    with refusal("cannot take back 2 tokens"):
        cache.crop(-2)
    assert torch.allclose(following(model, cache), expected, atol=1e-5)


# --- what a cache tells of itself


@pytest.mark.parametrize(("keep", "every", "length", "then"), [(0.25, "", 40, 0), (2000, ", every=800", 4000, 1)])
def test_a_cache_tells_what_it_holds(keep: float, every: str, length: int, then: int) -> None:
    """With places for tokens to come apart."""
    model, recipe = tiny("llama"), f"knorm(keep={keep}{every})"
    cache = keepset.Cache(model, recipe)
    assert repr(cache) == f"Cache({recipe}: empty)"
    for tokens in (length, then)[: 1 + then]:
        model(prompt(1, tokens), past_key_values=cache)
    heads = sum(layer.store.kv_heads for layer in cache.managed_layers.values())
    entry, kept, tokens = 2 * 16 * 4 * heads, int(keep if every else keep * length) + then, length + then
    entries_nbytes = kept * (entry + 4 * heads)  # with positions
    workspace = cache.nbytes - entries_nbytes
    assert cache.nbytes_full == tokens * entry
    assert (workspace >= 50_000) is bool(then) and (workspace == 0) is not bool(then)
    # The model has 32 bits; the share is of 16.
    counted, full = kept * (entry // 2 + 4 * heads), tokens * entry // 2
    assert cache.share == counted / full
    sizes = f"{counted / 1e6:.1f} MB of {full / 1e6:.1f} in 16 bits; {cache.nbytes / 1e6:.1f} MB allocated"
    assert repr(cache) == f"Cache({recipe}: {kept} of {tokens} tokens, {sizes})"
