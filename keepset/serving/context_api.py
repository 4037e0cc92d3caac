"""What a vLLM server's HTTP interface says and takes of keepset: middleware that `keepset serve` adds.

`{"keepset": {...}}` in the body of a request is checked here, where a wrong one can be answered with a sentence, and
goes on to the engine as one of vLLM's own extra arguments, with the owner of the key that asks. `GET /v1/contexts`
lists what contexts there are for that owner.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from keepset.errors import KeepsetError
from keepset.vllm import stats
from keepset.vllm.contexts import Context, ContextLibrary
from keepset.vllm.owned_contexts import EVERYBODY, check_save, owner_of
from keepset.vllm.settings import KEY, contexts_of, is_compressed, recipe_of, save_limit_of
from keepset.vllm.wishes import Wishes, wishes_of

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LISTING = "/v1/contexts"
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


_KEEPSET_ALONE = f"give {KEY!r} beside the prompt, not among vllm_xargs"


class ContextMiddleware:
    """Takes its place behind vLLM's own check of API keys, which would else come after it."""

    def __init__(self, app: Any) -> None:
        from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

        self._app: App = app
        behind = app
        while behind is not None and not isinstance(behind, AuthenticationMiddleware):
            behind = getattr(behind, "app", None)
        if behind is None:
            self._app = _Contexts(app, keys=False)
        else:
            behind.app = _Contexts(behind.app, keys=True)  # type: ignore[assignment,arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        await self._app(scope, receive, send)


class _Contexts:
    """`keys`: whether who asks has been asked for a key."""

    def __init__(self, app: App, keys: bool) -> None:
        self._app, self._keys = app, keys
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
        if isinstance(request, dict):
            try:
                wishes = self._wishes(scope, request)
                context = await asyncio.to_thread(self._checked, scope, wishes)
                if context is not None and self._library is not None:
                    for prompt in await self._prompts(scope, receive, request):
                        self._library.question(context, prompt)
            except KeepsetError as error:
                what = {"message": str(error), "type": "BadRequestError", "param": KEY, "code": 400}
                await _answer(send, 400, {"error": what})
                return
            if wishes != Wishes():
                request["vllm_xargs"] = {**(request.get("vllm_xargs") or {}), KEY: wishes.as_json()}
                body = json.dumps(request).encode()
                scope = {**scope, "headers": _sized(scope["headers"], body)}
        await self._app(scope, _repeated(body, receive), send)

    def _wishes(self, scope: Scope, request: dict[str, Any]) -> Wishes:
        """What a request asks for, taken out of it, and who asks."""
        more = request.get("vllm_xargs")
        if isinstance(more, dict) and KEY in more:
            raise KeepsetError(f"{_KEEPSET_ALONE}.")
        wishes = wishes_of(request.pop(KEY)) if KEY in request else Wishes()
        if wishes.owner != EVERYBODY:
            raise KeepsetError(f"{KEY}: whose contexts they are the API key says: leave owner out.")
        return replace(wishes, owner=self._owner(scope))

    def _owner(self, scope: Scope) -> str:
        if not self._keys:
            return EVERYBODY
        said = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        return owner_of(said.decode("latin-1").partition(" ")[2])

    def _checked(self, scope: Scope, wishes: Wishes) -> Context | None:
        """The context that is asked for; raises KeepsetError where the engine would end the request."""
        config = scope["app"].state.vllm_config
        if wishes.save is not None:
            check_save(save_limit_of(config), wishes.save)
        if wishes.context is not None:
            library = self._of(scope)
            if library is None:
                raise KeepsetError(f"There is no context {wishes.context!r}: start the server with --contexts.")
            return library.checked(wishes.context, wishes.owner)
        if wishes.is_own:
            wishes.recipe(recipe_of(config) if is_compressed(config) else None)
        return None

    async def _prompts(self, scope: Scope, receive: Receive, request: dict[str, Any]) -> list[list[int]]:
        """A request's prompts as the tokens that the server makes of them, so far as it says so."""
        given = request.get("prompt")
        if "messages" in request:
            texts = [{name: value for name, value in request.items() if name not in ("stream", "stream_options")}]
        elif isinstance(given, list) and all(isinstance(token, int) for token in given):
            return [given]
        elif isinstance(given, list) and all(isinstance(prompt, list) for prompt in given):
            return given
        else:
            some: dict[str, Any] = {name: request[name] for name in ("model", "add_special_tokens") if name in request}
            texts = [{**some, "prompt": text} for text in (given if isinstance(given, list) else [given])]
        tokens = [await self._tokens(scope, receive, text) for text in texts]
        return [prompt for prompt in tokens if prompt is not None]

    async def _tokens(self, scope: Scope, receive: Receive, request: dict[str, Any]) -> list[int] | None:
        """Of one prompt, from the server's own address for that; None where it refuses it, as it then will again."""
        body, answer = json.dumps(request).encode(), b""

        async def send(message: dict[str, Any]) -> None:
            nonlocal answer
            answer += message.get("body", b"")

        path = scope.get("root_path", "") + "/tokenize"
        place = {"path": path, "raw_path": path.encode(), "headers": _sized(scope["headers"], body)}
        await self._app({**scope, **place}, _repeated(body, receive), send)
        try:
            tokens = json.loads(answer).get("tokens")
        except (ValueError, AttributeError):
            return None
        return tokens if isinstance(tokens, list) else None

    def _listing(self, scope: Scope) -> dict[str, Any]:
        used, library = stats.contexts(), self._of(scope)
        return {
            "object": "list",
            "data": [
                {
                    "id": context.name,
                    "object": "context",
                    "saved": bool(context.owner),
                    "tokens": context.tokens,
                    "recipe": context.contents.header.recipe,
                    "kept": int(context.counts.sum()) / (context.counts.numel() * context.tokens),
                    "bytes": context.nbytes,
                    **used.get(context.title, {"requests": 0, "loads": 0}),
                }
                for context in ([] if library is None else library.all(self._owner(scope)))
            ],
        }

    def _of(self, scope: Scope) -> ContextLibrary | None:
        if self._library is None:
            config = scope["app"].state.vllm_config
            folder = contexts_of(config)
            self._library = None if folder is None else ContextLibrary(folder, config)
        return self._library


def _sized(headers: Sequence[tuple[bytes, bytes]], body: bytes) -> list[tuple[bytes, bytes]]:
    """Headers of a request with another body."""
    others = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*others, (b"content-length", str(len(body)).encode())]


def _repeated(body: bytes, receive: Receive) -> Receive:
    """Receives this body, and then what else comes, which is that the client has gone: vLLM waits for that."""
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
