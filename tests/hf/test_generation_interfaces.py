"""Other ways to `generate` than calling it: pipelines, and Hugging Face's custom generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline

import keepset
from tests.cli.conftest import tiny_model

EXAMPLES = str(Path(__file__).parents[2] / "examples")
RECIPE = "snapkv(window=4, keep=0.25)"
TEXTS = ["The ferry leaves at noon and comes back before the lamps are lit.", "Rain fell on the roofs of the town."]
GREEDY: dict[str, Any] = dict(max_new_tokens=6, do_sample=False)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture
def expected(model: Any, embedded: Any) -> list[str]:
    """Return what `generate` answers to each text, with a cache of its own."""
    answers = []
    for text in TEXTS:
        ids = embedded[1](text, return_tensors="pt")
        answer = model.generate(**ids, past_key_values=keepset.Cache(model, RECIPE), **GREEDY)
        assert not torch.equal(answer, model.generate(**ids, **GREEDY))
        answers.append(embedded[1].decode(answer[0, ids["input_ids"].shape[1] :]))
    return answers


def test_a_pipeline_takes_a_cache(model: Any, embedded: Any, expected: list[str]) -> None:
    pipe = pipeline("text-generation", model=model, tokenizer=embedded[1])
    cache = keepset.Cache(model, RECIPE)
    (answer,) = pipe(TEXTS[0], past_key_values=cache, return_full_text=False, **GREEDY)
    assert answer["generated_text"] == expected[0]
    assert cache.events


def test_custom_generation_makes_a_cache_for_every_call(
    model: Any, embedded: Any, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    custom: dict[str, Any] = dict(custom_generate=EXAMPLES, trust_remote_code=True, recipe=RECIPE)
    ids = embedded[1](TEXTS[1], return_tensors="pt")
    answer = model.generate(**ids, **custom, **GREEDY)
    assert embedded[1].decode(answer[0, ids["input_ids"].shape[1] :]) == expected[1]
    pipe = pipeline("text-generation", model=model, tokenizer=embedded[1])
    answers = pipe(TEXTS, return_full_text=False, **custom, **GREEDY)
    assert [answer["generated_text"] for (answer,) in answers] == expected
