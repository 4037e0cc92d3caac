"""Gemma 3 270M, whose windows of 512 tokens are shorter than these texts: a second real model."""

import random

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import keepset
from keepset.defaults import ANSWERED_AT_ONCE
from keepset.lab.texts import CITIES, Needle, essay, haystack, insert, secret_number

pytestmark = pytest.mark.full

Gemma = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def test_a_text_begins_with_bos_without_which_the_model_knows_less(gemma: Gemma) -> None:
    model, tokenizer = gemma
    ids = tokenizer(essay()[:3000], return_tensors="pt")["input_ids"][:, :600]
    assert ids[0, 0] == tokenizer.bos_token_id == 2
    with torch.inference_mode():
        known, lacking = (float(model(part, labels=part).loss) for part in (ids, ids[:, 1:]))
    assert known < 3.2 and lacking > known + 0.4  # nats a token; 2.93 and 3.68


def test_a_cache_that_drops_nothing_says_the_models_tokens(gemma: Gemma) -> None:
    model, tokenizer = gemma
    prompt = tokenizer(haystack(3, 2600), return_tensors="pt")
    options = dict(max_new_tokens=12, do_sample=False)
    cache = keepset.Cache(model, "snapkv(keep=1.0)")
    assert torch.equal(model.generate(**prompt, past_key_values=cache, **options), model.generate(**prompt, **options))
    assert prompt["input_ids"].shape[1] > 512
    # Three of eighteen layers hold all of the text; the others hold their windows, which the cache says.
    assert cache.nbytes_fixed / cache.nbytes > 0.75
    assert f" MB allocated, {cache.nbytes_fixed / 1e6:.1f} of them in windows and states)" in str(cache)


def test_the_default_recipe_finds_the_facts_that_the_full_cache_finds(gemma: Gemma) -> None:
    model, tokenizer = gemma
    draw = random.Random(0)
    text, facts = haystack(0, 2600), []
    for number, city in enumerate(draw.sample(CITIES, 3)):
        facts.append(secret_number(city, str(draw.randrange(10000, 99999))))
        text = insert(text, facts[-1], (number + 0.5) / 3)

    def found(fact: Needle, recipe: str | None) -> bool:
        prompt = tokenizer(f"{text}\n\n{fact.opening}", return_tensors="pt")
        cache = None if recipe is None else keepset.Cache(model, recipe)
        answer = model.generate(**prompt, past_key_values=cache, max_new_tokens=6, do_sample=False)
        return fact.answer in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])

    plain = [found(fact, None) for fact in facts]
    assert sum(plain) >= 2
    assert sum(found(fact, ANSWERED_AT_ONCE) for fact in facts) >= sum(plain)
