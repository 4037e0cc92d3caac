"""Mixed precision by `torch.autocast`, in all of a text or in a part of it, against transformers' own cache."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import keepset
from keepset.hf.batch import go_together
from keepset.hf.prompt_session import PromptSession
from tests.hf.contract.builds import class_of, configuration
from tests.hf.models import feed, padded_prompt, prompt, recipe, same_keep_set, statistics, tiny, with_random_weights

MODELS = ["llama", "qwen3", "gpt_oss", "gemma3", "falcon_h1", "gemma4", "gpt2", "deepseek_v2"]
"""Of plain attention, norms of queries, sinks, windows, states, several sizes of heads, no rotation, and latents."""
WHERE = {"all": (1, 1, 1), "the prompt": (1, 1, 0), "the question": (0, 0, 1), "half of the prompt": (1, 0, 0)}
"""What runs in bfloat16: each half of the prompt, and the tokens after it."""
WHOLE = "all", "the question"
"""Where the prompt comes in one forward, without padding."""
LENGTH, HALF = 30, 14

RECIPES = [recipe(name, 12) for name in keepset.METHODS]
RECIPES += ["tova(keep=12, every=4)", "adakv(tova, keep=12, every=4)", "adakv(r_kv(window=4), keep=12, every=4)"]
RECIPES += ["match(adakv(snapkv(window=4)), keep=12)", "gvote(future=3, keep=0.5)", "compilerkv(window=3, keep=12)"]
RECIPES += ["expected_attention(future=16, buffer=8, keep=12, every=8)", "criticalkv(second_pass, keep=12)"]
RECIPES += ["quantized(adakv(knorm), bits=8, keep=12)", "quantized(tova, bits=4, keep=12, every=4)"]
ALIKE = 0.8
"""The share of entries that stay in float32, too. Rounding decides near ties; 0.88 was seen."""
QUICK = ["match(snapkv(window=4), window=4, keep=12)", "tova(keep=12, every=4)", "r_kv(window=5, kernel=3, keep=12)"]
QUICK += ["h2o(keep=12)", "gvote(future=3, keep=0.5)", "second_pass(keep=12)"]
ROUNDING = 0.03
"""Of products to 8 bits, as a share of the largest logit: half of it was seen, and 2e-6 in float32."""


@cache
def model_of(name: str) -> Any:
    if name == "deepseek_v2":
        config = configuration(name)
        config.first_k_dense_replace = config.num_hidden_layers  # see below
        torch.manual_seed(0)
        return with_random_weights(class_of(name)._from_config(config).eval())
    statistics(name)
    return tiny(name)


def answer(model: Any, past: Any, where: str, mixed: bool = True) -> Tensor:
    """Logits after a prompt, a question, and three tokens that come one by one."""
    padding = [0, 0] if where in WHOLE else [0, 5]
    ids, mask = padded_prompt(padding, LENGTH)
    ids = torch.cat([ids, prompt(2, 9, seed=1)], 1)
    mask = torch.cat([mask, torch.ones(2, 9, dtype=mask.dtype)], 1)
    logits, first = [], 0
    for end in (*([] if where in WHOLE else [HALF]), LENGTH, 36, 37, 38, 39):
        part = 0 if first < HALF else 1 if first < LENGTH else 2
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed and bool(WHERE[where][part])):
            logits.append(feed(model, past, ids[:, first:end], mask[:, :end])[:, -1].float())
        first = end
    return torch.stack(logits, 1)


def check(name: str, text: str, where: str) -> None:
    """A recipe keeps about the same entries as in float32, or refuses a model as it does there."""
    model, parsed = model_of(name), keepset.Recipe.parse(text)

    def run(mixed: bool) -> keepset.Cache:
        past = keepset.Cache(model, parsed, prompt_length=LENGTH)
        assert answer(model, past, where, mixed).isfinite().all()
        return past

    try:
        past = run(True)
    except keepset.KeepsetError as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            run(False)
        return
    plain = run(False)
    assert past.keep_set is not None and plain.keep_set is not None
    overlap = past.keep_set.overlap(plain.keep_set)
    assert float(overlap.mean()) > ALIKE


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(4)
def test_everything_kept_is_the_models_own_answer(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    for router in (module for module in model.modules() if hasattr(module, "top_k")):
        monkeypatch.setattr(router, "top_k", router.num_experts)  # a rounding error may choose other experts
    logits = answer(model, keepset.Cache(model, "knorm(keep=1.0)", prompt_length=LENGTH), where)
    model.set_attn_implementation("sdpa" if name != "gpt_oss" else "eager")
    expected = answer(model, DynamicCache(config=model.config), where)
    assert float((logits - expected).abs().max()) < ROUNDING * float(expected.abs().max())


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("text", QUICK)
@pytest.mark.few(5)
def test_recipes_run(text: str, where: str) -> None:
    check("gpt_oss", text, where)


@pytest.mark.full
@pytest.mark.cross
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("text", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_every_recipe_runs_on_every_kind_of_model(name: str, text: str, where: str) -> None:
    check(name, text, where)


@torch.no_grad()
def test_one_prefill_for_several_recipes() -> None:
    model, parsed = tiny("llama"), keepset.Recipe.parse("match(r_kv(window=5, kernel=3), window=4, keep=12)")
    ids = prompt(1, LENGTH)
    with torch.autocast("cpu", torch.bfloat16):
        shared, alone = PromptSession(model, ids, [parsed]).compress(parsed).cache, keepset.Cache(model, parsed)
        model(ids, past_key_values=alone)
        assert same_keep_set(shared.keep_set, alone.keep_set)
        question = prompt(1, 5, seed=1)
        logits = [model(question, past_key_values=cache).logits for cache in (shared, alone)]
    torch.testing.assert_close(*logits)


@torch.no_grad()
def test_caches_of_several_precisions_go_together() -> None:
    model, recipes = tiny("llama"), ["knorm(keep=12)", "quantized(tova, keep=12)", "snapkv(window=3, keep=8, every=4)"]
    caches = []
    for text in recipes:
        for mixed in (False, True):
            caches.append(keepset.Cache(model, text))
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                model(prompt(1, LENGTH), past_key_values=caches[-1])
    alone, tokens = [cache.fork() for cache in caches], prompt(len(caches), 1)
    for mixed in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            logits, errors = go_together(model, caches, tokens)
            expected = [
                model(row[None], past_key_values=past).logits[0, -1] for row, past in zip(tokens, alone, strict=True)
            ]
        assert errors == {}
        torch.testing.assert_close(logits.float(), torch.stack(expected).float(), rtol=0.0, atol=0.1)
