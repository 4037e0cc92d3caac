"""Requests to an application of a server, without a server."""

from __future__ import annotations

import asyncio
from typing import Any


def call(app: Any, method: str, path: str, body: bytes, key: str = "", /, **scope: Any) -> list[Any]:
    """All messages that the application sends; the body comes in two pieces, and then the client stays."""
    pieces, sent = [body[:5], body[5:]], list[Any]()

    async def receive() -> Any:
        if not pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
    whole: dict[str, Any] = {"type": "http", "method": method, "path": path, "raw_path": path.encode()}
    whole |= {"headers": headers, "query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http"}
    whole |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "asgi": {"version": "3.0"}, "extensions": {}}
    asyncio.run(app(whole | {"state": {}} | scope, receive, send))
    return sent


def text_of(sent: list[Any]) -> str:
    """The body of what was sent."""
    return b"".join(message.get("body", b"") for message in sent[1:]).decode()
