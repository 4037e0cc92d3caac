"""What agents say of a conversation's memory, in a server that keeps conversations: compaction and context editing."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from keepset.errors import KeepsetError
from keepset.serving import compaction, context_editing
from keepset.serving.exchange import App, Exchange, Receive, Scope, Send, answer_json, api_key, repeated
from keepset.vllm.settings import recipe_of

_Handler = Callable[[Exchange], Awaitable[None]]

_EDITING = b"context_management"
_HANDLERS: dict[str, tuple[_Handler, tuple[bytes, ...]]] = {
    "/v1/responses": (compaction.respond, (b"compaction", _EDITING)),
    "/v1/responses/compact": (compaction.compact, (b"",)),
    "/v1/messages": (context_editing.respond, (_EDITING,)),
    "/v1/messages/count_tokens": (context_editing.count, (_EDITING,)),
}
"""What answers a route's requests, and words of which one is in all of them."""


class AgentProtocols:
    """Answers requests that speak of a conversation's memory, and has vLLM answer all others.

    Args:
        app: vLLM's application, which gets bodies in one piece.
        keys: whether the server has API keys.
    """

    def __init__(self, app: App, keys: bool) -> None:
        self._app, self._keys = app, keys
        self._has_turns: bool | None = None  # not known before vLLM's configuration is

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in _HANDLERS or not self._talks(scope):
            await self._app(scope, receive, send)
            return
        message = await receive()
        body = message.get("body", b"")
        handler, words = _HANDLERS[path]
        request = _parsed(body) if any(word in body for word in words) else None
        if not isinstance(request, dict):
            await self._app(scope, repeated(body, receive), send)
            return
        try:
            await handler(Exchange(self._app, scope, receive, send, request, api_key(scope) if self._keys else b""))
        except KeepsetError as error:
            await answer_json(send, 400, _error(str(error), path))
        except RecursionError:
            await answer_json(send, 400, _error("The body is nested too deeply: send a flatter one.", path))

    def _talks(self, scope: Scope) -> bool:
        """Return whether the server keeps conversations."""
        if self._has_turns is None:
            recipe = recipe_of(scope["app"].state.vllm_config)
            self._has_turns = recipe is not None and recipe.schedule.turns
        return self._has_turns


def _parsed(body: bytes) -> Any:
    """Return a body's JSON; None if it is none, which vLLM refuses."""
    try:
        return json.loads(body)
    except ValueError:
        return None


def _error(sentence: str, path: str) -> dict[str, Any]:
    """Return a refusal in the form of the errors of a route's protocol.

    Args:
        sentence: what is wrong, for the client.
        path: the route.
    """
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": "invalid_request_error", "message": sentence}}
    return {"error": {"message": sentence, "type": "BadRequestError", "param": None, "code": 400}}
