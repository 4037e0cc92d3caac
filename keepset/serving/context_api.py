"""What a vLLM server's HTTP interface says and takes of contexts: middleware that `keepset serve --contexts` adds.

`{"keepset": {"context": NAME}}` in the body of a request is checked here, where a wrong one can be answered with a
sentence, and goes on to the engine as one of vLLM's own extra arguments. `GET /v1/contexts` lists what there is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from keepset.errors import KeepsetError
from keepset.vllm import stats
from keepset.vllm.contexts import ContextLibrary
from keepset.vllm.settings import KEY, contexts_of
from keepset.vllm.wishes import wishes_of

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LISTING = "/v1/contexts"
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


class ContextMiddleware:
    """Takes its place behind vLLM's own check of API keys, which would else come after it."""

    def __init__(self, app: Any) -> None:
        from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

        self._app: App = app
        behind = app
        while behind is not None and not isinstance(behind, AuthenticationMiddleware):
            behind = getattr(behind, "app", None)
        if behind is None:
            self._app = _Contexts(app)
        else:
            behind.app = _Contexts(behind.app)  # type: ignore[assignment,arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        await self._app(scope, receive, send)


class _Contexts:
    def __init__(self, app: App) -> None:
        self._app = app
        self._library: ContextLibrary | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and path == LISTING and scope["method"] == "GET":
            await _answer(send, 200, await asyncio.to_thread(self._listing, scope))
        elif scope["type"] == "http" and path in _GENERATING and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            request = None  # vLLM says so itself
        if isinstance(request, dict) and KEY in request:
            try:
                wishes = wishes_of(request.pop(KEY))
                await asyncio.to_thread(self._of(scope).checked, wishes.context)
            except KeepsetError as error:
                what = {"message": str(error), "type": "BadRequestError", "param": KEY, "code": 400}
                await _answer(send, 400, {"error": what})
                return
            request["vllm_xargs"] = {**(request.get("vllm_xargs") or {}), KEY: wishes.as_json()}
            body = json.dumps(request).encode()
            headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
            scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        await self._app(scope, _repeated(body, receive), send)

    def _listing(self, scope: Scope) -> dict[str, Any]:
        used = stats.contexts()
        return {
            "object": "list",
            "data": [
                {
                    "id": context.name,
                    "object": "context",
                    "tokens": context.tokens,
                    "recipe": context.contents.header.recipe,
                    "kept": int(context.counts.sum()) / (context.counts.numel() * context.tokens),
                    "bytes": context.nbytes,
                    **used.get(context.name, {"requests": 0, "loads": 0}),
                }
                for context in self._of(scope)
            ],
        }

    def _of(self, scope: Scope) -> ContextLibrary:
        if self._library is None:
            config = scope["app"].state.vllm_config
            folder = contexts_of(config)
            assert folder is not None
            self._library = ContextLibrary(folder, config)
        return self._library


def _repeated(body: bytes, receive: Receive) -> Receive:
    """What is received, once the body has been."""
    told = False

    async def again() -> dict[str, Any]:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _answer(send: Send, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
