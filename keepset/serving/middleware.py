"""keepset's part of a vLLM server's HTTP interface: middleware that `keepset serve` adds.

The middleware checks the object `{"keepset": {...}}` in the body of a request. It adds the owner of the API key, signs
both, and passes them to the engine among vLLM's extra arguments. The engine accepts nothing unsigned. A route that does
not take the object answers 400 if a body has one. Only the engine can refuse some requests, for example if a prompt
does not begin with a context; the answer then has the engine's reason in place of vLLM's error 500.

`GET /v1/contexts` lists an owner's contexts, and the files that cannot be served, each with the reason.
`GET /v1/conversations` lists an owner's conversations, and `DELETE /v1/conversations/NAME` deletes one.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from keepset.errors import KeepsetError
from keepset.serving import conversations
from keepset.serving.agents import AgentProtocols
from keepset.serving.exchange import App, Message, Receive, Scope, Send, api_key
from keepset.serving.exchange import answer_json as _answer
from keepset.serving.exchange import repeated as _repeated
from keepset.serving.exchange import sized as _sized
from keepset.serving.usage import UsageEditor, count_context, tell_turn
from keepset.vllm import stats
from keepset.vllm.contexts import EVERYBODY, SUFFIX, ContextLibrary, check_save, owner_of
from keepset.vllm.request_options import NO_CONTEXTS, RequestOptions, has_key, parse_options
from keepset.vllm.settings import KEY, contexts_of, is_compressed, is_signed, recipe_of, save_limit_of

MAX_BODY = 2**26
"""The most bytes of a request's body. The whole body is in memory, and is parsed while other requests wait."""

LISTING = "/v1/contexts"
HONOURED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
)
"""The routes that take the object. On each of them vLLM asks for the API key, and passes vllm_xargs on."""


class RequestMiddleware:
    """Middleware that puts keepset's part after vLLM's check of API keys, which would otherwise run later."""

    def __init__(self, app: Any) -> None:
        from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

        self._app: App = app
        behind = app
        while behind is not None and not isinstance(behind, AuthenticationMiddleware):
            behind = getattr(behind, "app", None)
        if behind is None:
            self._app = _RequestHandler(app, keys=False)
        else:
            behind.app = _RequestHandler(behind.app, keys=True)  # type: ignore[assignment,arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._app(scope, receive, send)


class _RequestHandler:
    """Checks requests, and lists contexts; `keys` says whether vLLM has checked the client's key before."""

    def __init__(self, app: App, keys: bool) -> None:
        self._app, self._keys = AgentProtocols(app, keys), keys
        self._library: ContextLibrary | None = None
        self._has_turns: bool | None = None  # not known before vLLM's configuration is

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and path == LISTING and scope["method"] == "GET":
            await _answer(send, 200, await asyncio.to_thread(self._listing, scope))
        elif scope["type"] == "http" and conversations.is_route(scope["method"], path):
            await self._tell_conversations(scope, send, path)
        elif scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS") and not _is_form(scope):
            await self._read(scope, receive, send, path in HONOURED and scope["method"] == "POST")
        else:
            await self._app(scope, receive, send)

    async def _tell_conversations(self, scope: Scope, send: Send, path: str) -> None:
        """Answer a request to list conversations, or to delete one.

        Args:
            scope: the connection, as ASGI describes it.
            send: sends a message to the client.
            path: the request's path.
        """
        if not self._talks(scope):
            await _refuse(send, "This server keeps no conversations: start it with turns=True in its recipe.", 404)
            return
        try:
            content = await conversations.answer(scope["app"].state, path, self._owner(scope))
        except KeepsetError as error:
            await _refuse(send, str(error))
        except TimeoutError:
            await _refuse(send, "The engine does not answer: ask again later.", 503)
        else:
            if content is None:
                await _refuse(send, "There is no conversation of this name: GET /v1/conversations lists yours.", 404)
            else:
                await _answer(send, 200, content)

    async def _read(self, scope: Scope, receive: Receive, send: Send, honoured: bool) -> None:
        """Check and sign the keepset options in a request's body, and pass it to vLLM; or refuse it.

        Args:
            scope: the connection, as ASGI describes it.
            receive: returns the client's next message.
            send: sends a message to the client.
            honoured: whether the route takes keepset options.
        """
        body = await _body(receive)
        if body is None:
            return
        if len(body) > MAX_BODY:
            await _refuse(send, f"The body has more than {MAX_BODY} bytes: send a smaller one.", 413)
            return
        try:
            request = json.loads(body)
        except RecursionError:
            await _refuse(send, "The body is nested too deeply: send a flatter one.")
            return
        except ValueError:
            request = None  # vLLM itself refuses it
        if isinstance(request, dict):
            try:
                options = _options(request, honoured)
                if honoured:
                    options = replace(options, owner=self._owner(scope))
                    await asyncio.to_thread(self._check, scope, options)
            except (KeepsetError, RecursionError) as error:
                await _refuse(send, self._without_paths(scope, str(error)))
                return
            if options != RequestOptions() or (honoured and self._talks(scope)):
                options = replace(options, ticket=secrets.token_hex(16))
                sealed = options.to_signed()
                request["vllm_xargs"] = {**(request.get("vllm_xargs") or {}), KEY: sealed}
                body = json.dumps(request).encode()
                scope = {**scope, "headers": _sized(scope["headers"], body)}
                refusal = partial(self._refusal, scope, options.ticket)
                editor = self._editor(scope, options, request.get("n"))
                answer = _Answer(send, refusal, sealed.partition(" ")[0].encode(), editor)
                await answer.by(self._app, scope, _repeated(body, receive))
                return
        await self._app(scope, _repeated(body, receive), send)

    def _talks(self, scope: Scope) -> bool:
        """Return whether the server keeps conversations, and can ask the engine what requests have of theirs."""
        if self._has_turns is None:
            config = scope["app"].state.vllm_config
            recipe = recipe_of(config) if is_signed(config) and has_key() else None
            self._has_turns = recipe is not None and recipe.schedule.turns
        return self._has_turns

    def _editor(self, scope: Scope, options: RequestOptions, number: Any) -> UsageEditor | None:
        """Return what adds to an answer what only the engine knows; None if that is nothing.

        vLLM counts a prompt with several answers once.

        Args:
            scope: the connection, as ASGI describes it.
            options: what the request asks for, with its ticket.
            number: how many answers it asks for, as the client wrote it.
        """
        if self._talks(scope):
            return UsageEditor(tell_turn(partial(stats.turns, options.ticket)))
        if options.context is None:
            return None
        answers = number if isinstance(number, int) and number > 0 else 1

        def tokens() -> tuple[int, int]:
            before, prompt = stats.tokens_in_front(options.ticket)
            return before // answers, prompt

        return UsageEditor(count_context(tokens))

    def _owner(self, scope: Scope) -> str:
        if not self._keys:
            return EVERYBODY
        return owner_of(api_key(scope).decode("latin-1"))

    def _check(self, scope: Scope, options: RequestOptions) -> None:
        """Raise `KeepsetError` if it is already known that the engine would refuse the request.

        Args:
            scope: the connection, as ASGI describes it.
            options: what the request asks for.
        """
        config = scope["app"].state.vllm_config
        if options != RequestOptions() and not (is_signed(config) and has_key()):
            raise KeepsetError("This server cannot sign requests: start it with keepset serve.")
        recipe = recipe_of(config) if is_compressed(config) else None
        if {options.save, options.context} != {None} and recipe is not None and recipe.schedule.turns:
            raise KeepsetError(NO_CONTEXTS)
        if options.save is not None:
            check_save(save_limit_of(config), options.save)
        if options.context is not None:
            library = self._of(scope)
            if library is None:
                raise KeepsetError(f"There is no context {options.context!r}: start the server with --contexts.")
            library.checked(options.context, options.owner)
        if options.is_own:
            options.recipe(recipe)

    def _refusal(self, scope: Scope, ticket: str) -> str | None:
        """Return why the engine has refused the request of this ticket; None if it has not.

        Args:
            scope: the connection, as ASGI describes it.
            ticket: the request's ticket.
        """
        why = stats.refusal(ticket)
        return None if why is None else self._without_paths(scope, why)

    def _without_paths(self, scope: Scope, sentence: str) -> str:
        """Replace paths of contexts' files in a sentence by the contexts' names: no client may see paths.

        Args:
            scope: the connection, as ASGI describes it.
            sentence: the sentence, for the client.
        """
        folder = contexts_of(scope["app"].state.vllm_config)
        if folder is None:
            return sentence
        path = rf"{re.escape(str(folder))}/(?:saved/[^/]*/)?([^/'\"@]*)(?:@[^/'\"]*)?"
        return re.sub(path, lambda found: found[1].removesuffix(SUFFIX), sentence)

    def _listing(self, scope: Scope) -> dict[str, Any]:
        used, library, owner = stats.contexts(), self._of(scope), self._owner(scope)
        refused = {} if library is None else library.refused(owner)
        return {
            "object": "list",
            "data": [
                {
                    "id": context.name,
                    "object": "context",
                    "saved": bool(context.owner),
                    "tokens": context.tokens,
                    "recipe": context.contents.header.recipe,
                    "kept": round(int(context.counts.sum()) / (context.counts.numel() * context.tokens), 4),
                    "bytes": context.nbytes,
                    **used.get(context.title, {"requests": 0, "loads": 0}),
                }
                for context in ([] if library is None else library.all(owner))
            ],
            "refused": [{"id": name, "reason": self._without_paths(scope, why)} for name, why in refused.items()],
        }

    def _of(self, scope: Scope) -> ContextLibrary | None:
        if self._library is None:
            config = scope["app"].state.vllm_config
            folder = contexts_of(config)
            self._library = None if folder is None else ContextLibrary(folder, config)
        return self._library


async def _body(receive: Receive) -> bytes | None:
    """Return a request's body; None if the client has disconnected. The part above the limit is dropped."""
    pieces, size, more_body = [], 0, True
    while more_body:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece, more_body = message.get("body", b""), message.get("more_body", False)
        if size <= MAX_BODY:
            pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def _is_form(scope: Scope) -> bool:
    """Return whether the body is a form, such as audio to transcribe. Routes for forms do not take the object."""
    header = next((value for name, value in scope["headers"] if name.lower() == b"content-type"), b"")
    return header.lower().startswith(b"multipart/")


def _options(request: dict[str, Any], honoured: bool) -> RequestOptions:
    """Take the object out of a request and return it; raise `KeepsetError` if it cannot be taken.

    Args:
        request: the body of a request, from which the object is removed.
        honoured: whether the route takes keepset options.
    """
    xargs, sampling = request.get("vllm_xargs"), request.get("sampling_params")
    if honoured and xargs is not None and not isinstance(xargs, dict):
        raise KeepsetError("vllm_xargs is not an object: give names and values, or leave it out.")
    extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
    holders = xargs, sampling, extra, request.get("kv_transfer_params")
    if any(isinstance(holder, dict) and KEY in holder for holder in holders):
        raise KeepsetError(f"Give {KEY!r} at the top of the body, not among other arguments.")
    if KEY not in request:
        return RequestOptions()
    if not honoured:
        raise KeepsetError(f"This route takes no {KEY!r}: leave it out, or ask at one of {', '.join(HONOURED)}.")
    if request.get("use_beam_search"):
        raise KeepsetError(f"A beam search takes no {KEY!r}: leave one of the two out.")
    return parse_options(request.pop(KEY))


class _Answer:
    """Sends vLLM's answer without the object's signature, or the engine's reason if it has refused the request."""

    def __init__(
        self, send: Send, refusal: Callable[[], str | None], signature: bytes, editor: UsageEditor | None
    ) -> None:
        self._send, self._refusal, self._signature, self._editor = send, refusal, signature, editor
        self._start: Message | None = None
        self._status, self._refused, self._held = 0, False, b""

    async def by(self, app: App, scope: Scope, receive: Receive) -> None:
        """Let an application answer a request.

        Args:
            app: the application.
            scope: the connection, as ASGI describes it.
            receive: returns the client's next message.
        """
        try:
            await app(scope, receive, self)
        except Exception:  # vLLM raises an error when the engine has refused a streaming request
            if not await self._refuse():
                raise

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # Held back until the first piece of the body, which may be a refusal.
            self._start, self._status = message, message["status"]
            return
        body, more_body = message.get("body", b""), message.get("more_body", False)
        if self._editor is not None:
            body = self._editor.shown(body, more_body)
            if more_body and not body:
                return
        if self._refused or ((self._status >= 500 or b'"error"' in body) and await self._refuse()):
            return
        if self._start is not None:
            if self._editor is not None:
                self._start = {**self._start, "headers": _sized(self._start["headers"], None if more_body else body)}
            await self._send(self._start)
            self._start = None
        shown = (self._held + body).replace(self._signature, b"*" * len(self._signature))
        self._held = _beginning(shown, self._signature) if more_body else b""
        await self._send({**message, "body": shown[: len(shown) - len(self._held)]})

    async def _refuse(self) -> bool:
        """End the answer with the engine's refusal, if there is one; return whether there is."""
        if not self._refused and (sentence := self._refusal()) is not None:
            self._refused = True
            if self._start is not None or not self._status:
                await _refuse(self._send, sentence)
            else:  # the status is sent
                event = f"data: {json.dumps(_error(sentence))}\n\n".encode()
                await self._send({"type": "http.response.body", "body": event, "more_body": False})
        return self._refused


def _beginning(body: bytes, signature: bytes) -> bytes:
    """Return the end of a piece if it may begin a signature that continues in the next piece.

    Args:
        body: the piece of an answer.
        signature: the signature that is looked for.
    """
    lengths = range(min(len(body), len(signature) - 1), 0, -1)
    return next((body[-length:] for length in lengths if signature.startswith(body[-length:])), b"")


async def _refuse(send: Send, sentence: str, status: int = 400) -> None:
    await _answer(send, status, _error(sentence, status))


def _error(sentence: str, status: int = 400) -> dict[str, Any]:
    """Return a refusal in the form of vLLM's errors.

    Args:
        sentence: what is wrong, for the client.
        status: the HTTP status.
    """
    return {"error": {"message": sentence, "type": "BadRequestError", "param": KEY, "code": status}}
