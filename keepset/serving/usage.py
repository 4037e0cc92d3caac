"""What the engine knows of a request, in the objects of a server's answers that have a `usage`.

A context stands in front of a question only in the engine, and vLLM's front end counts the tokens of the question
alone. What a turn has of its conversation is known there, too. The engine notes both under the request's ticket.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from keepset.vllm.settings import KEY

_EVENT = b"data: "
"""The beginning of a line of a stream that has an object."""


Change = Callable[[dict[str, Any]], bool]
"""Changes an object of an answer that has a usage; returns whether it did."""


def count_context(tokens: Callable[[], tuple[int, int]]) -> Change:
    """Return what adds the tokens of a context to a usage.

    Args:
        tokens: returns the tokens that the engine put in front of prompts, and those of the newest prompt in all.
    """

    def change(part: dict[str, Any]) -> bool:
        before, prompt = tokens()
        if before:
            _count(part["usage"], before, prompt)
        return bool(before)

    return change


def tell_turn(figures: Callable[[], dict[str, int]]) -> Change:
    """Return what puts the object `keepset` beside a usage.

    Args:
        figures: returns what the request has of its conversation; nothing if that is not known.
    """

    def change(part: dict[str, Any]) -> bool:
        known = figures()
        if known:
            part[KEY] = known
        return bool(known)

    return change


class UsageEditor:
    """Changes what an answer says beside or in its usage, piece by piece.

    Args:
        change: what changes an object that has a usage.
    """

    def __init__(self, change: Change) -> None:
        self._change = change
        self._held = b""

    def shown(self, piece: bytes, more_body: bool) -> bytes:
        """Return the part of an answer that is complete, and changed.

        Args:
            piece: the answer's next piece.
            more_body: whether others follow.
        """
        received = self._held + piece
        # An object ends with its line, or with the answer.
        end = received.rfind(b"\n") + 1 if more_body else len(received)
        self._held = received[end:]
        return b"".join(map(self._changed, received[:end].splitlines(keepends=True)))

    def _changed(self, line: bytes) -> bytes:
        start = _EVENT if line.startswith(_EVENT) else b""
        if b'"usage"' not in line:
            return line
        try:
            answer = json.loads(line[len(start) :])
        except ValueError:
            return line
        if not any([self._change(part) for part in _parts(answer) if isinstance(part.get("usage"), dict)]):
            return line
        return (
            start
            + json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
            + b"\n" * line.endswith(b"\n")
        )


def _parts(answer: Any) -> list[dict[str, Any]]:
    """Return the objects of an answer that may have a usage: itself, and those in events of two routes."""
    parts = [answer, *(answer.get(name) for name in ("response", "message"))] if isinstance(answer, dict) else []
    return [part for part in parts if isinstance(part, dict)]


def _count(usage: dict[str, Any], before: int, prompt: int) -> None:
    """Add the tokens before prompts to a usage in the terms of one of vLLM's routes.

    Args:
        usage: the usage, which is changed.
        before: tokens before all prompts of the request.
        prompt: tokens of its newest prompt, with those before.
    """
    if "total_tokens" in usage:
        for name in ("prompt_tokens", "input_tokens", "total_tokens"):
            if isinstance(usage.get(name), int):
                usage[name] += before
    elif isinstance(usage.get("input_tokens"), int):  # those that no cache has
        cached = [usage.get(name) or 0 for name in ("cache_read_input_tokens", "cache_creation_input_tokens")]
        usage["input_tokens"] = max(prompt - sum(cached), 0)
