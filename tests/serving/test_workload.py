from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from keepset.serving.load import Load
from keepset.serving.workload import TokenSource, essay_tokens, prompts


def load(**options: Any) -> Load:
    return Load(**{"requests": 5, "prompt_tokens": 7, "output_tokens": 1, "concurrency": 1, **options})


def test_prompts_are_different_slices_of_the_text() -> None:
    text = list(range(100, 160))
    warm_up, *rounds = prompts(TokenSource(text, text=True), load(rounds=2))
    assert [len(each) for each in rounds] == [5, 5] and len(warm_up) == 1
    flat = [*warm_up, *rounds[0], *rounds[1]]
    assert len({prompt[0] for prompt in flat}) == 11
    for prompt in flat:
        assert prompt == [100 + (prompt[0] - 100 + i) % 60 for i in range(7)]


def test_the_seed_decides() -> None:
    text = TokenSource(list(range(1000)), text=True)
    assert prompts(text, load()) == prompts(text, load())
    assert prompts(text, load()) != prompts(text, load(seed=1))


def test_a_short_text_goes_round() -> None:
    (_, few) = prompts(TokenSource([5, 6], text=True), load())
    assert len(few) == 5
    assert all(prompt in ([5, 6, 5, 6, 5, 6, 5], [6, 5, 6, 5, 6, 5, 6]) for prompt in few)


def test_random_tokens_are_of_the_vocabulary() -> None:
    (_, texts) = prompts(TokenSource([3, 8, 9], text=False), load(requests=50))
    assert {token for prompt in texts for token in prompt} == {3, 8, 9}
    assert {len(prompt) for prompt in texts} == {7}


def test_essays_without_special_tokens(embedded: Any) -> None:
    tokens = essay_tokens(embedded[1])
    assert tokens.text and tokens.note is None
    assert len(tokens.ids) > 100_000
    assert set(tokens.ids).isdisjoint(embedded[1].all_special_ids)
    assert "I" in embedded[1].decode(tokens.ids[:200])


def test_without_the_essays_tokens_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    tokenizer = SimpleNamespace(all_special_ids=[0], get_vocab=lambda: {"a": 2, "b": 1, "</s>": 0})
    tokens = essay_tokens(tokenizer)
    assert (tokens.ids, tokens.text) == ([1, 2], False)
    assert tokens.note is not None and tokens.note.startswith("Prompts are random tokens. The essays are not installed")
