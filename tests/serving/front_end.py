"""A stand-in for vLLM's front end, whose tokens are words, behind what answers agents."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from keepset.serving.agents import AgentProtocols

TURNS = "adakv(snapkv, bytes=0.25, turns=True)"
LAST = b": the end"
"""What a stream ends with: a comment, and no empty line."""
MOST = 1000
"""The most words of a prompt."""


def words_of(content: Any) -> int:
    """How many words are in all texts of some content."""
    if isinstance(content, str):
        return len(content.split())
    if isinstance(content, dict):
        return sum(map(words_of, content.values()))
    return sum(map(words_of, content)) if isinstance(content, list) else 0


def stream_of(*events: dict[str, Any]) -> bytes:
    """The bytes of a stream of events."""
    return (
        b"".join(b"event: %b\ndata: %b\n\n" % (one["type"].encode(), json.dumps(one).encode()) for one in events) + LAST
    )


class FrontEnd:
    """Answers like vLLM's front end, in pieces of `size` bytes, and remembers the bodies of what it was asked."""

    def __init__(self, recipe: str = TURNS, keys: bool = False, size: int = 7) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answer: dict[str, Any] = {"output": [], "usage": None}
        self.events: list[dict[str, Any]] = []
        self._size = size
        config = SimpleNamespace(additional_config={"keepset": recipe})
        self._app, self._agents = SimpleNamespace(state=SimpleNamespace(vllm_config=config)), AgentProtocols(self, keys)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert dict(scope["headers"])[b"content-length"] == str(len(message["body"])).encode()
        body = json.loads(message["body"] or b"null")
        status, content = self._answered(scope["path"], body)
        is_stream = isinstance(content, bytes)
        kind = b"text/event-stream; charset=utf-8" if is_stream else b"application/json"
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = [(b"content-type", kind)] + [(b"content-length", str(len(text)).encode())] * (not is_stream)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for start in range(0, len(text), self._size):
            piece = text[start : start + self._size]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _answered(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "base"}, {"id": "adapter"}]}
        if path == "/tokenize":
            assert body["add_special_tokens"] is False
            return 200, {"count": words_of(body["prompt"])}
        self.asked.append((path, body))
        if path == "/v1/messages/count_tokens":
            words = words_of(body["messages"])
            return (400, {"error": "too long"}) if words > MOST else (200, {"input_tokens": words})
        return 200, stream_of(*self.events) if body.get("stream") else self.answer

    def said(self, path: str) -> Any:
        """What was asked last of a route."""
        return next(body for asked, body in reversed(self.asked) if asked == path)

    def post(self, path: str, body: Any, key: str = "") -> tuple[int, Any]:
        """The status and the JSON, or the events, of the answer to a client."""
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent, before = list[Any](), len(self.asked)
        pieces = [{"type": "http.request", "body": text, "more_body": False}]

        async def receive() -> Any:
            if not pieces:
                await asyncio.Event().wait()
            return pieces.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
        headers += [(b"authorization", f"Bearer {key}".encode())] * bool(key)
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "app": self._app}
        asyncio.run(self._agents(scope, receive, send))
        answer = b"".join(message.get("body", b"") for message in sent)
        said = {name: value for name, value in sent[0]["headers"]}
        if said[b"content-type"].startswith(b"text/event-stream"):
            *blocks, last = answer.split(b"\n\n")
            events = [block.split(b"\ndata: ") for block in blocks]
            assert last == (LAST if len(self.asked) > before else b"")
            parsed = [json.loads(data) for _, data in events]
            assert [kind for kind, _ in events] == [f"event: {one['type']}".encode() for one in parsed]
            return sent[0]["status"], parsed
        assert said[b"content-length"] == str(len(answer)).encode()
        return sent[0]["status"], json.loads(answer)
