"""Every route of vLLM's front end, as vLLM builds it: none takes words to keepset but those that are listed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from keepset.serving.context_api import HONOURED, KEY
from keepset.vllm import signing

OWNER = "1" * 32
WORDS = [{"save": "a", "owner": OWNER}, {"keep": 0.5}, "text", 7, None, [1], json.dumps({"save": "a", "owner": OWNER})]
FORGED = [
    *({"vllm_xargs": {KEY: words}} for words in WORDS),
    *({"sampling_params": {"extra_args": {KEY: words}}} for words in WORDS),
    {"sampling_params": {KEY: {"off": True}}},
]
"""What nobody may say anywhere."""
SAID = [{KEY: words} for words in WORDS]
"""What is refused where nobody reads it, and where it is read is checked."""


def built(*options: str) -> Any:
    """vLLM's application with all the routes that it has, and keepset's middleware."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = ["--enable-scale-out", "--enable-fault-tolerance", *options]
    words += ["--middleware", "keepset.serving.context_api.ContextMiddleware"]
    app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args(words), ("generate", "transcription"), None)
    app.state.vllm_config = SimpleNamespace(additional_config={"keepset_signed": True, KEY: "knorm(keep=0.5)"})
    return app


@pytest.fixture(scope="module")
def apps() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv(signing.SIGNING_KEY, signing.new_key())
        logging.disable(logging.WARNING)
        yield {"no key": built(), "key": built("--api-key", "one")}
        logging.disable(logging.NOTSET)


def routes(app: Any) -> list[tuple[str, str]]:
    """Methods and paths of an application that may have bodies."""
    with_methods = [(route.path, sorted(route.methods)) for route in app.routes if getattr(route, "methods", None)]
    return [(method, path) for path, methods in with_methods for method in methods if method not in ("GET", "HEAD")]


def answer(app: Any, method: str, path: str, body: bytes, key: str = "", kind: str = "application/json") -> Any:
    """Status and text of what an application answers."""
    pieces, answered = [body[:7], body[7:]], []

    async def receive() -> Any:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        answered.append(message)

    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": headers}
    scope |= {"query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http", "state": {}}
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "asgi": {"version": "3.0"}, "extensions": {}}
    asyncio.run(app(scope, receive, send))
    return answered[0]["status"], b"".join(piece.get("body", b"") for piece in answered[1:]).decode()


@pytest.mark.parametrize("guard", ["no key", "key"])
def test_no_route_takes_what_it_is_not_to_take(guard: str, apps: dict[str, Any]) -> None:
    app, key = apps[guard], "one" if guard == "key" else ""
    known = routes(app)
    assert len(known) > 20 and {("POST", path) for path in (*HONOURED, "/invocations")} <= set(known)
    for method, path in [*known, ("POST", "/v9/not/yet"), ("PUT", "/v9/not/yet")]:
        for said in FORGED + ([] if path in HONOURED else SAID):
            for body in (said, {"model": "m", "prompt": "a", "messages": [{"role": "user", "content": "a"}], **said}):
                status, text = answer(app, method, path, json.dumps(body).encode(), key)
                assert status == 400 and KEY in json.loads(text)["error"]["message"], (path, body, text)


def test_a_route_that_is_new_is_no_way_in(apps: dict[str, Any]) -> None:
    seen = []
    app = built()

    async def new(request: Any) -> Any:
        seen.append(await request.json())

    app.add_route("/v1/brand/new", new, methods=["POST"])
    for said in FORGED + SAID:
        assert answer(app, "POST", "/v1/brand/new", json.dumps(said).encode())[0] == 400
    assert not seen


@pytest.mark.parametrize("guard", ["no key", "key"])
def test_what_is_wrong_is_refused_where_it_is_read(guard: str, apps: dict[str, Any]) -> None:
    wrong = [body for body in SAID if body != {KEY: {"keep": 0.5}}]
    for path in HONOURED:
        for body in [*wrong, {"vllm_xargs": "text", KEY: {"off": True}}, {"vllm_xargs": [1]}]:
            assert answer(apps[guard], "POST", path, json.dumps(body).encode(), "one")[0] == 400, (path, body)
        deep = b'{"keepset": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        assert answer(apps[guard], "POST", path, deep, "one")[0] == 400


def test_every_route_that_takes_words_asks_for_the_key(apps: dict[str, Any]) -> None:
    body = json.dumps({KEY: {"keep": 0.5}}).encode()
    for path in HONOURED:
        for key in ("", "two"):
            assert answer(apps["key"], "POST", path, body, key)[0] == 401


def test_every_route_that_takes_words_passes_them_to_the_engine() -> None:
    """Each makes a request whose sampling parameters have them."""
    from vllm import SamplingParams
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    said: dict[str, Any] = {"model": "m", "vllm_xargs": {KEY: "words"}}
    messages = [{"role": "user", "content": "a"}]
    anthropic = AnthropicMessagesRequest(messages=messages, max_tokens=3, **said)
    batch = BatchChatCompletionRequest(messages=[messages], **said)
    requests = {
        "/v1/completions": CompletionRequest(prompt="a", **said),
        "/v1/chat/completions": ChatCompletionRequest(messages=messages, **said),
        "/v1/chat/completions/batch": batch.to_chat_completion_request(messages),
        "/v1/responses": ResponsesRequest(input="a", **said),
        "/v1/messages": AnthropicServingMessages._build_base_request(anthropic, messages),
    }
    assert tuple(requests) == HONOURED
    for path, request in requests.items():
        parameters = request.to_sampling_params(9, {})
        assert isinstance(parameters, SamplingParams) and (parameters.extra_args or {})[KEY] == "words", path
