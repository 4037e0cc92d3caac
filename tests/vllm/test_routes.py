"""Every route of vLLM's front end, as vLLM builds it: none takes words to keepset but those that are listed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from keepset.serving import middleware
from keepset.serving.middleware import HONOURED, KEY
from keepset.vllm import request_options

KNOWN = """
    /tokenize /detokenize /v1/systemone /ping /invocations /collective_rpc /sleep /wake_up /pause /resume
    /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /release_kv_cache_memory /abort_requests
    /init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update /start_draft_weight_update
    /update_weights /finish_weight_update /update_weight_version /weight_checker /scale_elastic_ep
    /is_scaling_elastic_ep /fault_tolerance/apply /generative_scoring /inference/v1/generate
    /inference/v1/abort_requests /v1/chat/completions /v1/chat/completions/batch /v1/chat/completions/render
    /v1/chat/completions/derender /v1/completions /v1/completions/render /v1/completions/derender /v1/messages
    /v1/messages/count_tokens /v1/messages/render /v1/responses /v1/responses/{response_id}/cancel
    /v1/responses/render /v1/audio/transcriptions /v1/audio/translations
"""
"""Paths to which something can be posted. Of a new one it must be seen whether it is to take words to keepset."""
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


def built(*options: str) -> Any:
    """vLLM's application with all the routes that it has, and keepset's middleware."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = ["--enable-scale-out", "--enable-fault-tolerance", *options]
    words += ["--middleware", "keepset.serving.middleware.RequestMiddleware"]
    tasks = ("generate", "transcription", "realtime")
    app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args(words), tasks, None)
    app.state.vllm_config = SimpleNamespace(additional_config={"keepset_signed": True, KEY: "knorm(keep=0.5)"})
    return app


@pytest.fixture(scope="module")
def apps() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv(request_options.SIGNING_KEY, request_options.new_key())
        level = logging.root.level
        logging.disable(logging.WARNING)
        made = {"no key": built(), "key": built("--api-key", "one")}
        logging.disable(logging.NOTSET)
        logging.root.setLevel(level)  # what vLLM imports has raised it, and other tests look for warnings
        yield made


def routes(app: Any) -> list[tuple[str, str]]:
    """Methods and paths of an application that may have bodies."""
    with_methods = [(route.path, sorted(route.methods)) for route in app.routes if getattr(route, "methods", None)]
    return [(method, path) for path, methods in with_methods for method in methods if method not in ("GET", "HEAD")]


def test_every_route_is_known(apps: dict[str, Any]) -> None:
    for app in apps.values():
        assert set(routes(app)) <= {("POST", path) for path in KNOWN.split()}
        # It takes sounds, and a session's messages have no place for arguments.
        sockets = [route.path for route in app.routes if type(route).__name__ == "APIWebSocketRoute"]
        assert sockets == ["/v1/realtime"]


def answer(app: Any, method: str, path: str, body: bytes, key: str = "") -> Any:
    """Status and text of what an application answers."""
    sent = call(app, method, path, body, key)
    return sent[0]["status"], text_of(sent)


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


def test_what_is_wrong_is_refused_where_it_is_read(apps: dict[str, Any]) -> None:
    """Also words that are deep, and those of a beam search, whose requests have parameters of their own."""
    wrong = [body for body in SAID if body != {KEY: {"keep": 0.5}}]
    beams = {"model": "m", "prompt": "a", "use_beam_search": True, KEY: {"off": True}}
    deep = b'{"keepset": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for path in HONOURED:
        for body in [*wrong, {"vllm_xargs": "text", KEY: {"off": True}}, {"vllm_xargs": [1]}]:
            assert answer(apps["no key"], "POST", path, json.dumps(body).encode())[0] == 400, (path, body)
        assert answer(apps["no key"], "POST", path, deep)[0] == 400
        status, text = answer(apps["no key"], "POST", path, json.dumps(beams).encode())
        assert status == 400 and "beam search takes no" in text
        for key in ("", "two"):
            assert answer(apps["key"], "POST", path, json.dumps({KEY: {"keep": 0.5}}).encode(), key)[0] == 401


def test_a_server_behind_a_prefix_is_no_way_in() -> None:
    right = json.dumps({KEY: {"keep": 0.5, "off": True}}).encode()
    for options, key in (((), ""), (("--api-key", "one"), "one")):
        app = built("--root-path", "/api", *options)
        for path in ("/api/v1/completions", "/v1/completions", "/api/v1/messages"):
            for said in FORGED:
                assert answer(app, "POST", path, json.dumps(said).encode(), key)[0] == 400, (path, said)
            status, text = answer(app, "POST", path, right, key)
            assert status == 400 and "with off nothing is dropped" in text
            assert not key or answer(app, "POST", path, right)[0] == 401
        for path in ("/api/api/v1/completions", "/apiv1/completions", "/api//v1/completions"):
            assert "takes no" in answer(app, "POST", path, right, key)[1]


def test_a_body_has_a_limit(apps: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_BODY", 1000)
    body = json.dumps({KEY: {"off": 1}}).encode()
    assert answer(apps["no key"], "POST", "/v1/completions", body.ljust(1000))[0] == 400
    status, text = answer(apps["no key"], "POST", "/v1/completions", body.ljust(1001))
    assert status == 413 and "more than 1000 bytes" in json.loads(text)["error"]["message"]


def test_no_piece_of_an_answer_shows_a_signature() -> None:
    signature = b"abab" * 15 + b"abac"
    text = b'data: "ab' + signature + b'"\n\n' + signature + b"ababab, and the end is aba"

    async def answered(pieces: list[bytes]) -> bytes:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for number, piece in enumerate(pieces):
                await send({"type": "http.response.body", "body": piece, "more_body": number + 1 < len(pieces)})

        await middleware._Answer(send, lambda: None, signature, None).by(app, {}, send)
        assert len(sent) == 1 + len(pieces)
        return b"".join(message["body"] for message in sent[1:])

    cuts = [[text[:at], text[at:]] for at in range(len(text))]
    cuts += [[text[at : at + size] for at in range(0, len(text), size)] for size in (1, 2, 7, 63, 64, 65)]
    for pieces in cuts:
        assert asyncio.run(answered(pieces)) == text.replace(signature, b"*" * 64)


@pytest.mark.parametrize("begun", [0, 1, 2])
@pytest.mark.parametrize("refusal", ["It cannot be.", None])
def test_an_answer_that_breaks_off_ends_with_the_refusal(begun: int, refusal: str | None) -> None:
    """vLLM's /v1/responses sends its status before the engine has seen the request."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        some = [{"type": "http.response.start", "status": 200, "headers": []}]
        some += [{"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}]
        for message in some[:begun]:
            await send(message)
        raise ValueError("broken")

    answer = middleware._Answer(send, lambda: refusal, b"a" * 64, None).by(app, {}, send)
    if refusal is None:
        with pytest.raises(ValueError, match="broken"):
            asyncio.run(answer)
        return
    asyncio.run(answer)
    text = sent[-1]["body"].decode().removeprefix("data: ")
    assert json.loads(text)["error"]["message"] == refusal and not sent[-1].get("more_body")
    assert [message["type"] for message in sent[:-1]].count("http.response.start") == 1
    assert sent[0]["status"] == (200 if begun == 2 else 400)


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
