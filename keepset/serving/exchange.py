"""Requests to vLLM's HTTP interface and its answers, as middleware sees them: whole, asked beside, and edited."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

Change = Callable[[dict[str, Any]], Awaitable[list[dict[str, Any]]]]
"""Returns what is sent in place of an object of an answer."""

_STREAM = b"text/event-stream"
_DATA = b"data: "
_BETWEEN = b"\n\n"


@dataclass(frozen=True)
class Exchange:
    """A request with a JSON body, and what can be done with it.

    Attributes:
        app: vLLM's application.
        scope: the connection, as ASGI describes it.
        receive: returns the client's messages after the body.
        send: sends a message to the client.
        request: the body.
        api_key: the client's API key; empty if the server has none.
    """

    app: App
    scope: Scope
    receive: Receive
    send: Send
    request: dict[str, Any]
    api_key: bytes

    async def forward(self, change: Change | None = None, marks: Sequence[bytes] = ()) -> None:
        """Let vLLM answer.

        Args:
            change: what changes objects of the answer if it is none of an error; None to leave it as it is.
            marks: only events of a stream that contain one of these are changed.
        """
        body = json.dumps(self.request).encode()
        scope = {**self.scope, "headers": sized(self.scope["headers"], body)}
        send = self.send if change is None else _AnswerEditor(self.send, change, marks)
        await self.app(scope, repeated(body, self.receive), send)

    async def ask(self, method: str, path: str, content: Any = None) -> tuple[int, Any]:
        """Return the status and the JSON that vLLM answers to another request of this client; None for other text.

        Args:
            method: the HTTP method.
            path: the route.
            content: the request's body, as JSON.
        """
        body = b"" if content is None else json.dumps(content).encode()
        root = self.scope.get("root_path", "")
        path = (root if self.scope["path"].startswith(root) else "") + path
        scope = {**self.scope, "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": sized(self.scope["headers"], body), "state": dict(self.scope.get("state") or {})}
        messages: list[Message] = []

        async def send(message: Message) -> None:
            messages.append(message)

        await self.app(scope, repeated(body, asyncio.Event().wait), send)  # type: ignore[arg-type]
        try:
            answer = json.loads(b"".join(message.get("body", b"") for message in messages))
        except ValueError:
            answer = None
        return messages[0]["status"], answer

    async def answer(self, content: Any) -> None:
        """Answer with JSON."""
        await answer_json(self.send, 200, content)

    async def stream(self, events: Sequence[dict[str, Any]]) -> None:
        """Answer with a stream of events."""
        await self.send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", _STREAM)]})
        await self.send({"type": "http.response.body", "body": b"".join(_event(event) + _BETWEEN for event in events)})


class _AnswerEditor:
    """Sends an answer with other objects: one object of JSON, or events of a stream."""

    def __init__(self, send: Send, change: Change, marks: Sequence[bytes]) -> None:
        self._send, self._change, self._marks = send, change, marks
        self._start: Message = {}
        self._held = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            if self._is_plain or self._is_stream:
                await self._send(message)
        elif self._is_plain or message["type"] != "http.response.body":
            await self._send(message)
        elif self._is_stream:
            await self._send({**message, "body": await self._events(message)})
        else:
            self._held += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_changed()

    @property
    def _is_plain(self) -> bool:
        return self._start["status"] != 200

    @property
    def _is_stream(self) -> bool:
        kinds = (value for name, value in self._start["headers"] if name.lower() == b"content-type")
        return next(kinds, b"").startswith(_STREAM)

    async def _events(self, message: Message) -> bytes:
        """Return the events that are complete with this piece, changed."""
        received = self._held + message.get("body", b"")
        complete, between, self._held = received.rpartition(_BETWEEN)
        if not message.get("more_body", False):
            between, self._held = between + self._held, b""
        blocks = (complete + between).split(_BETWEEN)
        changed: list[bytes] = []
        for block in blocks:
            if any(mark in block for mark in self._marks):
                data = next(line for line in block.splitlines() if line.startswith(_DATA))
                changed += map(_event, await self._change(json.loads(data[len(_DATA) :])))
            else:
                changed.append(block)
        return _BETWEEN.join(changed)

    async def _send_changed(self) -> None:
        (content,) = await self._change(json.loads(self._held))
        body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        await self._send({**self._start, "headers": sized(self._start["headers"], body)})
        await self._send({"type": "http.response.body", "body": body})


def _event(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"event: %b\ndata: %b" % (content["type"].encode(), text)


async def answer_json(send: Send, status: int, content: Any) -> None:
    """Send an answer of JSON.

    Args:
        send: sends a message to the client.
        status: the HTTP status.
        content: the answer.
    """
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def api_key(scope: Scope) -> bytes:
    """Return the API key that a client has sent; empty if it has sent none."""
    header: bytes = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
    return header.partition(b" ")[2]


def sized(headers: Sequence[tuple[bytes, bytes]], body: bytes | None) -> list[tuple[bytes, bytes]]:
    """Return the headers of a message with another body; None if its size is not known.

    Args:
        headers: names and values of the headers.
        body: the new body; None if its size is not known yet.
    """
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return kept if body is None else [*kept, (b"content-length", str(len(body)).encode())]


def repeated(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives this body, and then the message that the client has disconnected.

    Args:
        body: the body of the request, in one piece.
        receive: returns the messages that follow.
    """
    received = False

    async def again() -> dict[str, Any]:
        nonlocal received
        if received:
            return await receive()
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
