"""Tokens of a context in the `usage` of a server's answers: vLLM's front end counts those of a question alone.

A context stands in front of a question only in the engine, which notes it under the request's ticket.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_EVENT = b"data: "
"""The beginning of a line of a stream that has an object."""


class UsageCounter:
    """Adds the tokens of contexts to the usage in an answer, piece by piece.

    Args:
        tokens: returns the tokens that the engine put in front of prompts, and those of the newest prompt in all.
    """

    def __init__(self, tokens: Callable[[], tuple[int, int]]) -> None:
        self._tokens = tokens
        self._held = b""

    def shown(self, piece: bytes, more_body: bool) -> bytes:
        """Return the part of an answer that is complete, with all tokens counted.

        Args:
            piece: the answer's next piece.
            more_body: whether others follow.
        """
        received = self._held + piece
        # An object ends with its line, or with the answer.
        end = received.rfind(b"\n") + 1 if more_body else len(received)
        self._held = received[end:]
        return b"".join(map(self._counted, received[:end].splitlines(keepends=True)))

    def _counted(self, line: bytes) -> bytes:
        start = _EVENT if line.startswith(_EVENT) else b""
        if b'"usage"' not in line:
            return line
        try:
            answer = json.loads(line[len(start) :])
        except ValueError:
            return line
        before, prompt = self._tokens()
        found = [part["usage"] for part in _parts(answer) if isinstance(part.get("usage"), dict)]
        if not before or not found:
            return line
        for usage in found:
            _count(usage, before, prompt)
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
