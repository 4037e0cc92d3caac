"""Edits of a conversation: which of its tokens a prompt still has, in their order, before it goes on with new ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

_RUN = 16
"""So many tokens must agree behind tokens that were left out: fewer agree by chance."""
_LAST = 4
"""So many are enough if they are the conversation's last ones."""

Span = tuple[int, int]
"""The first of some tokens, and the one after the last."""


class Edit(NamedTuple):
    """What a prompt has of a conversation.

    Attributes:
        end: how many of the conversation's tokens the prompt goes on from; those behind are dropped.
        left_out: the spans before that are not in the prompt.
        matched: how many of the prompt's tokens the others are.
    """

    end: int
    left_out: tuple[Span, ...]
    matched: int


class Continuation(NamedTuple):
    """How a prompt goes on with a conversation, by the positions that its tokens have there.

    Attributes:
        tokens: how many of the conversation's tokens it goes on from; those behind are dropped.
        left_out: spans of positions before that are not in the prompt, beside those that earlier ones lacked.
        matched: how many of the prompt's tokens the others are.
        said: how many of the conversation's tokens, without what earlier prompts lacked, it goes on from.
        is_whole: whether no token behind is dropped.
        is_over: whether the newest turn is over; else it is asked for again. A client may send another answer than it
            got, or the same in other tokens: that turn is over, too.
    """

    tokens: int
    left_out: tuple[Span, ...]
    matched: int
    said: int
    is_whole: bool
    is_over: bool


def continuation_of(
    ids: Sequence[int], left_out: Sequence[Span], newest: int, prompt: Sequence[int], known: int
) -> Continuation:
    """Return how a prompt goes on with a conversation.

    Args:
        ids: the token at each position of the conversation.
        left_out: spans of positions that earlier prompts have left out.
        newest: how many of the other tokens are the newest turn's prompt.
        prompt: the prompt, of which at least one token is new.
        known: how many of the other tokens the prompt is known to begin with.
    """
    positions = positions_without(left_out, len(ids))
    said = [ids[position] for position in positions] if left_out else ids
    edit = edit_of(said, prompt, known)
    is_whole = edit.end == len(said)
    tokens = len(ids) if is_whole else positions[edit.end - 1] + 1 if edit.end else 0
    spans = tuple((positions[first], positions[end - 1] + 1) for first, end in edit.left_out)
    # Some templates end a prompt otherwise once it is answered; then the new prompt ends as the newest turn's did.
    new, ending = len(prompt) - edit.matched, list(said[edit.end : newest])
    is_over = is_whole or (new > max(len(ending), 1) and ending == list(prompt[len(prompt) - len(ending) :]))
    return Continuation(tokens, spans, edit.matched, edit.end, is_whole, is_over)


def edit_of(said: Sequence[int], prompt: Sequence[int], known: int) -> Edit:
    """Return what a prompt has of a conversation, if tokens were only left out of it before the prompt goes on.

    Args:
        said: the conversation's tokens.
        prompt: the prompt, of which at least one token is new.
        known: how many tokens both are known to begin with.
    """
    end = matched = _agreeing(said, prompt, known, known)
    left_out: list[Span] = []
    while end < len(said) and matched < len(prompt) - 1:
        again = _next(said, prompt, end, matched)
        if again is None:
            break
        left_out.append((end, again))
        run = _agreeing(said, prompt, again, matched) - again
        end, matched = again + run, matched + run
    return Edit(end, tuple(left_out), matched)


def positions_without(left_out: Sequence[Span], tokens: int) -> list[int]:
    """Return the positions of so many tokens that are in none of some spans.

    Args:
        left_out: the spans, apart and in order.
        tokens: how many tokens there are.
    """
    ends = [0, *(end for _, end in left_out)]
    firsts = [*(first for first, _ in left_out), tokens]
    return [position for begin, end in zip(ends, firsts, strict=True) for position in range(begin, min(end, tokens))]


def first_place(tokens: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Return where some tokens first stand among others; None if they do not.

    Args:
        tokens: token ids.
        wanted: the token ids that are looked for, one or more.
    """
    ids = array("q", tokens)
    text, pattern = ids.tobytes(), array("q", wanted).tobytes()
    at = text.find(pattern)
    while at % ids.itemsize and at >= 0:  # the bytes begin within a token
        at = text.find(pattern, at + 1)
    return at // ids.itemsize if at >= 0 else None


def _agreeing(said: Sequence[int], prompt: Sequence[int], first: int, place: int) -> int:
    """Return the first token from `first` on that is not the prompt's from `place` on, without its last."""
    most = min(len(said), first + len(prompt) - 1 - place)
    while first < most and said[first] == prompt[place]:
        first, place = first + 1, place + 1
    return first


def _next(said: Sequence[int], prompt: Sequence[int], first: int, place: int) -> int | None:
    """Return the nearest token behind `first` from which on the conversation agrees with the prompt at `place`."""
    known = prompt[place : len(prompt) - 1]
    text, run = said[first + 1 :], known[:_RUN]
    if len(run) == _RUN and (found := first_place(text, run)) is not None:
        return first + 1 + found
    for length in range(min(len(known), len(text), _RUN - 1), _LAST - 1, -1):
        if list(text[-length:]) == list(known[:length]):
            return len(said) - length
    return None
