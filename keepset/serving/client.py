"""One streamed completion over HTTP, and the times at which its pieces came."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from keepset.serving.optional_imports import AsyncClient, Response, import_http

_MOST_CHARACTERS = 300


@dataclass
class Reply:
    """What became of one request; times are seconds since the round's start, tokens are counted by the server.

    Attributes:
        index: which request of its round.
        chunks: when each piece of the answer came; a piece may hold several tokens.
        error: why it failed; None if it did not.
    """

    index: int
    start: float
    chunks: list[float] = field(default_factory=list)
    end: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None

    @property
    def first_token(self) -> float | None:
        """Seconds to the first piece of the answer."""
        return self.chunks[0] - self.start if self.chunks else None

    @property
    def per_token(self) -> float | None:
        """Mean seconds from one token to the next, after the first."""
        if not self.chunks or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def total(self) -> float | None:
        """Seconds from sending the request to the end of its answer."""
        return None if self.end is None else self.end - self.start


class AnswerError(Exception):
    """A request that got no whole answer; the text says why."""


def connect(url: str, concurrency: int) -> AsyncClient:
    """A client for one server: so many connections and a few more, and no proxy on the way to it."""
    library = import_http()
    limits = library.Limits(max_connections=concurrency + 4, max_keepalive_connections=concurrency + 4)
    timeout = library.Timeout(10.0, read=None, pool=None)
    return library.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False)


async def complete(
    client: AsyncClient,
    model: str,
    prompt: list[int],
    tokens: int,
    *,
    index: int,
    began: float,
    timeout: float,
    context: str | None = None,
) -> Reply:
    """Ask for exactly so many tokens after a prompt, and a saved context before it; a failure is part of the reply."""
    reply = Reply(index, time.perf_counter() - began)
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if context is not None:
        body["keepset"] = {"context": context}
    try:
        async with asyncio.timeout(timeout):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise AnswerError(f"HTTP {response.status_code}: {_shorten(text)}")
                await _read(response, reply, began)
        if reply.output_tokens != tokens:
            raise AnswerError(f"{reply.output_tokens} tokens came instead of {tokens}")
    except TimeoutError:
        reply.error = f"no whole answer in {timeout:g} s"
    except (AnswerError, import_http().HTTPError, import_http().StreamError) as error:
        reply.error = str(error) or type(error).__name__
    reply.end = time.perf_counter() - began
    return reply


async def _read(response: Response, reply: Reply, began: float) -> None:
    # Not aiter_lines: it takes characters inside the answer's text, such as U+2028, for the end of a line.
    rest = b""
    async for piece in response.aiter_bytes():
        now = time.perf_counter() - began
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            text = line.removeprefix(b"data:").strip().decode(errors="replace")
            if text == "[DONE]":
                if reply.output_tokens is None:
                    raise AnswerError("the server did not say how many tokens there were")
                return
            _take(text, reply, now)
    raise AnswerError("the answer was cut off")


def _take(text: str, reply: Reply, now: float) -> None:
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise AnswerError(f"the answer is not JSON: {_shorten(text)}")
    if event.get("error") is not None:
        raise AnswerError(_shorten(str(event["error"])))
    if event.get("choices"):
        reply.chunks.append(now)
    if isinstance(usage := event.get("usage"), dict):
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        reply.prompt_tokens = prompt if isinstance(prompt, int) else None
        reply.output_tokens = output if isinstance(output, int) else None


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
