"""`ChatExample`: a conversation with questions about it, and the tokens of its messages."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepset.lab.tasks.task import Example, Question, Tokenizer

Message = Mapping[str, Any]
"""A message as chat templates take it. The last one may have `begun`, the first words of its answer; see `begun`."""

SEEN: Message = {"role": "assistant", "content": "I see."}
"""The answer to a turn that only tells something."""
PARTS = 3
"""The history's parts, from the oldest, that have scores of their own."""


@dataclass(frozen=True)
class ChatQuestion(Question):
    """A question about a conversation.

    Attributes:
        told: the turn in which the answer was told, counted from 1; the newest one if the answer is in several. 0 if it
            is in none.
        stale: the value that the answer has replaced; empty if there was none.
        groups: scores of their own that the answer counts for.
    """

    told: int = 0
    stale: str = ""
    groups: tuple[str, ...] = ()

    @property
    def message(self) -> Message:
        """The message that asks it."""
        return {"role": "user", "content": self.text, "begun": self.prefix}

    @property
    def answer(self) -> Message:
        """The right answer."""
        if self.choices:
            return {"role": "assistant", "content": self.choices[0]}
        ends = self.target if isinstance(self.target, str) else ", ".join(self.target)
        return {"role": "assistant", "content": f"{self.prefix} {ends}.".lstrip()}


@dataclass(frozen=True)
class ChatExample(Example):
    """A conversation; `context` joins what was said.

    Attributes:
        turns: the messages of every turn, of which the last is the assistant's answer.
        cleared: all messages as they are when the questions are asked, if these differ.
    """

    turns: tuple[tuple[Message, ...], ...] = ()
    cleared: tuple[Message, ...] = ()

    @property
    def asked(self) -> list[ChatQuestion]:
        """All questions."""
        return [question for question in self.questions if isinstance(question, ChatQuestion)]

    @property
    def messages(self) -> list[Message]:
        """All messages as they were said."""
        return [message for turn in self.turns for message in turn]


def told_in(turn: int, turns: int) -> str:
    """Return the group of what is told in a turn: one of the history's `PARTS`.

    Args:
        turn: the turn, counted from 1.
        turns: how many there are.
    """
    part = (turn - 1) * PARTS // turns
    first, last = -(-turns * part // PARTS) + 1, -(-turns * (part + 1) // PARTS)
    return f"told {first} to {last}"


def begun(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer whose chat template begins the answer with the words `begun` of the last message."""
    begins = copy.copy(tokenizer)
    template = tokenizer.get_chat_template().removesuffix("\n")
    begins.chat_template = template + "{% if add_generation_prompt %}{{ messages[-1]['begun'] or '' }}{% endif %}"
    return begins


def rendered(tokenizer: Tokenizer, messages: Sequence[Message], *, asks: bool) -> list[int]:
    """Return the tokens of messages.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the messages.
        asks: whether the beginning of an answer follows.
    """
    return list(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=asks, tokenize=True, return_dict=False
        )
    )
