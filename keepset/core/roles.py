"""Where a conversation's system message is, found by what its chat template puts before a user's message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from keepset.core.budget import Ranges
from keepset.core.edits import first_place
from keepset.errors import KeepsetError

_ADVICE = "protect ranges of tokens instead, such as protect=[[0, 512]]."


class ChatTokenizer(Protocol):
    """A tokenizer with a chat template, such as those of transformers."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return the token ids of a conversation."""
        ...


def user_mark(tokenizer: ChatTokenizer) -> list[int]:
    """Return the tokens that a chat template puts before a user's message, perhaps with the end of the one before.

    Args:
        tokenizer: the model's tokenizer.

    Raises:
        KeepsetError: the template puts different tokens before a first message and a later one, or renders neither.
    """

    def before(*earlier: tuple[str, str]) -> list[int]:
        """Return the tokens up to a message's content: there, two contents begin to differ."""
        one, other = (
            tokenizer.apply_chat_template(
                [{"role": role, "content": text} for role, text in (*earlier, ("user", content))],
                tokenize=True,
                return_dict=False,
            )
            for content in ("seven", "Paris")
        )
        return list(one[: _common(one, other)])

    try:
        first, later = before(), before(("user", "one"), ("assistant", "two"))
    except Exception as error:  # a template is a program of others
        raise KeepsetError(
            f"protect='system' asks the model's chat template what comes before a user's message, and that fails "
            f"({error}): {_ADVICE}"
        ) from error
    length = _common(first[::-1], later[::-1])
    if not length:
        raise KeepsetError(
            "protect='system' needs a chat template that puts the same tokens before every message of a user, and this "
            f"model's does not: {_ADVICE}"
        )
    return first[len(first) - length :]


def system_span(ids: Sequence[int], mark: Sequence[int]) -> Ranges:
    """Return where all tokens before the first user's message are: a range, or none if there are no such tokens.

    Args:
        ids: the tokens of a conversation, from its first on.
        mark: the tokens before a user's message.
    """
    end = first_place(ids, mark)
    return ((0, end),) if end else ()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    differ = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
