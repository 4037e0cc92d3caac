"""A cache serves one text: another one that `generate` is given is refused, and the same with more goes on."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import pipeline

import keepset
from tests.hf.models import full, generate, padded_prompt, prompt, refusal, tiny
from tests.lab.cli.conftest import tiny_model
from tests.tiers import TYPECHECK

LENGTH = 30
REFUSED = "the input begins with others: make a new keepset.Cache for each text"
pytestmark = pytest.mark.filterwarnings("error:The input has other tokens")


def more(ids: Tensor, n: int, seed: int = 9) -> Tensor:
    return torch.cat([ids, prompt(len(ids), n, seed)], 1)


@pytest.mark.parametrize("options", [{}, dict(num_beams=2), dict(num_return_sequences=2, do_sample=True)])
def test_another_longer_prompt(options: dict[str, Any]) -> None:
    model, ids = tiny("llama"), prompt(1, LENGTH)
    cache = keepset.Cache(model, "snapkv(window=5, kernel=3, keep=12)")
    generate(model, ids, cache, max_new_tokens=4, **options)
    other = more(ids, 20)
    other[0, 7] += 1
    for copied in (cache, cache.fork(), copy.deepcopy(cache)):
        with refusal(REFUSED):
            generate(model, other, copied, max_new_tokens=2, **options)
        assert copied.get_seq_length() == LENGTH + 3


def test_the_text_is_that_of_the_rows_in_their_order_without_what_was_taken_back() -> None:
    """Turns of a chat go on, whatever token padding is."""
    model, (ids, mask) = tiny("llama"), padded_prompt([0, 7], LENGTH)
    cache = keepset.Cache(model, "knorm(keep=1.0)")
    for turn in range(3):
        answer = generate(model, ids, cache, mask, max_new_tokens=4).sequences
        assert torch.equal(answer, full(model, ids, mask, max_new_tokens=4).sequences)
        model.set_attn_implementation("keepset")
        cache.crop(-2)
        cache.reorder_cache(torch.tensor([1, 0]))
        ids, mask = more(answer[:, :-3].flip(0), 5, turn), mask.flip(0)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        ids = ids.where(mask.bool(), 5 + turn)
        with refusal(REFUSED):
            generate(model, ids.flip(0), cache, mask.flip(0), max_new_tokens=4)
    cache.reset()
    generate(model, prompt(1, LENGTH, 5), cache, max_new_tokens=2)


def test_an_answer_in_other_tokens_is_warned_of() -> None:
    model, ids = tiny("llama"), prompt(1, LENGTH)
    cache = keepset.Cache(model, "knorm(keep=12)")
    answer = generate(model, ids, cache, max_new_tokens=6).sequences
    again = more(answer, 5)
    again[0, LENGTH + 1] += 1
    with pytest.warns(UserWarning, match="in the place of those that were generated before") as caught:
        generate(model, again, cache.fork(), max_new_tokens=2)
    assert TYPECHECK or caught[0].filename.endswith("models.py")  # where generate is called
    with pytest.warns(UserWarning, match="in the place of"):
        generate(model, more(ids, 20), cache.fork(), max_new_tokens=2)
    generate(model, more(answer, 5), cache, max_new_tokens=2)


def test_a_saved_text_is_known_by_its_digest(tmp_path: Path) -> None:
    model, ids, path = tiny("llama"), prompt(1, LENGTH), tmp_path / "context"
    cache = keepset.Cache(model, "knorm(keep=12)")
    generate(model, ids, cache, max_new_tokens=1)
    cache.save(path, token_ids=ids[0].tolist())
    expected = generate(model, more(ids, 5), cache, max_new_tokens=3).sequences
    assert torch.equal(
        generate(model, more(ids, 5), keepset.Cache.load(path, model), max_new_tokens=3).sequences, expected
    )
    with refusal(REFUSED):
        generate(model, prompt(1, LENGTH + 5, 3), keepset.Cache.load(path, model), max_new_tokens=3)


def test_a_pipeline_with_three_texts_and_one_cache(embedded: Any) -> None:
    model = tiny_model()
    pipe = pipeline("text-generation", model=model, tokenizer=embedded[1])
    texts = [
        "The ferry leaves.",
        "Rain fell on all the roofs of the town.",
        "A lamp was lit before anybody came to the pier.",
    ]
    with refusal(REFUSED):
        pipe(texts, past_key_values=keepset.Cache(model, "knorm(keep=0.5)"), max_new_tokens=2, do_sample=False)
    alone = pipe(texts[1], past_key_values=keepset.Cache(model, "knorm(keep=0.5)"), max_new_tokens=2, do_sample=False)
    assert alone[0]["generated_text"].startswith(texts[1])


def test_other_caches_are_asked_nothing() -> None:
    model, ids = tiny("llama"), prompt(1, LENGTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        past = generate(model, ids, None, max_new_tokens=3).past_key_values
        generate(model, more(prompt(1, LENGTH, 3), 9), past, max_new_tokens=2)
