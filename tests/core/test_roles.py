"""What comes before a conversation's first user is found by the tokens that templates put before users' messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from keepset import Budget, Recipe
from keepset.core.roles import system_span, user_mark
from keepset.errors import KeepsetError

CHATML = ("<i>{role}\n{content}<e>\n", "<i>system\nBe kind.<e>\n")
INSTRUCTED = ("{content}</s>", "")
HEADERS = ("<h>{role}</h>\n\n{content}<e>", "<b>")


class Words:
    """A tokenizer of words and marks, with a template that joins messages."""

    def __init__(self, message: str, begin: str, users: str | None = None) -> None:
        self._message, self._begin, self._users = message, begin, users
        self._ids: dict[str, int] = {}

    def tokens(self, text: str) -> list[int]:
        return [self._ids.setdefault(part, len(self._ids)) for part in re.findall(r"<[^>]*>|\w+|\W", text)]

    def text(self, messages: Sequence[dict[str, str]]) -> str:
        begin = "" if messages[0]["role"] == "system" else self._begin
        parts = []
        for message in messages:
            of_user = self._users if message["role"] == "user" else None
            parts.append((of_user or self._message).format(**message))
        return begin + "".join(parts)

    def apply_chat_template(self, conversation: Any, **options: Any) -> list[int]:
        assert options == {"tokenize": True, "return_dict": False}
        return self.tokens(self.text(conversation))


def messages(*contents: str) -> list[dict[str, str]]:
    roles = ["system", "user", "assistant", "user"][-len(contents) :]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


TEMPLATES = {
    "chatml": Words(*CHATML),
    "instructed": Words(*INSTRUCTED, users="<U>{content}<A>"),
    "headers": Words(*HEADERS),
}


@pytest.mark.parametrize("tokenizer", TEMPLATES.values(), ids=TEMPLATES)
def test_what_comes_before_the_first_user_is_found(tokenizer: Words) -> None:
    chat = messages("Answer in one word, user", "seven", "two", "Paris")
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    ((first, end),) = system_span(ids, user_mark(tokenizer))
    before = tokenizer.text(chat[:1])
    assert first == 0
    # The mark may begin with the end of the message before, which templates put behind every message.
    assert tokenizer.tokens(before)[:end] == ids[:end] and len(tokenizer.tokens(before)) - end <= 2
    assert set(tokenizer.tokens("Answer in one word")) <= set(ids[:end])


def test_without_a_user_nothing_is_found() -> None:
    assert system_span([1, 2, 3, 4], [3, 5]) == ()
    assert system_span([3, 5, 4], [3, 5]) == ()
    assert system_span([1, 2**40, 3, 5, 4, 3, 5], [3, 5]) == ((0, 2),)
    assert system_span([256, 1, 3], [1]) == ((0, 1),)  # not where its bytes begin within a token


def test_templates_that_do_not_say() -> None:
    with pytest.raises(KeepsetError, match=r"puts the same tokens before every message.*protect=\[\[0, 512\]\]"):
        user_mark(Words("{content}", ""))

    class Broken(Words):
        def text(self, messages: Sequence[dict[str, str]]) -> str:
            raise TypeError("no documents")

    with pytest.raises(KeepsetError, match=r"that fails \(no documents\): protect ranges"):
        user_mark(Broken(*CHATML))


def test_a_budget_gets_the_tokens() -> None:
    budget = Budget(9, protect=["system", [4, 6]])
    assert budget.protects_system and budget.with_system(((0, 5),)) == Budget(9, protect=[[0, 6]])
    assert budget.with_system(()) == Budget(9, protect=[[4, 6]])
    plain = Budget(9)
    assert not plain.protects_system and plain.with_system(((0, 5),)) is plain
    recipe = Recipe.parse("snapkv(bytes=0.25, turns=True, protect='system')")
    assert recipe.budget.protects_system and Recipe.parse(str(recipe)) == recipe
    for text in ("snapkv(bytes=0.25, protect='system')", "snapkv(keep=99, every=8, turns=True, protect='system')"):
        with pytest.raises(KeepsetError, match="add turns=True, and leave every= and images out"):
            Recipe.parse(text)
