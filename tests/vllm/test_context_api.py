"""What the server's middleware answers, rewrites and passes on, without a server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import keepset
from keepset.serving.context_api import ContextMiddleware
from keepset.vllm import stats


@pytest.fixture(scope="module")
def folder(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contexts")
    cache = keepset.Cache(tiny_model, "knorm(keep=0.25)")
    with torch.no_grad():
        tiny_model(torch.arange(100)[None], past_key_values=cache)
    cache.save(folder / "manual.safetensors")
    content = bytearray((folder / "manual.safetensors").read_bytes())
    content[-9] ^= 1
    (folder / "flipped.safetensors").write_bytes(content)
    return folder


class Inner:
    """A server that repeats what it was told."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert dict(scope["headers"])[b"content-length"] == str(len(message["body"])).encode()
        self.bodies.append(json.loads(message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def server(folder: Path, model: PreTrainedModel, inner: Any) -> Any:
    model_config = SimpleNamespace(
        model=model.config.name_or_path,
        architecture="LlamaForCausalLM",
        hf_text_config=model.config,
        dtype=torch.float32,
        max_model_len=512,
    )
    config = SimpleNamespace(additional_config={"keepset_contexts": str(folder)}, model_config=model_config)
    middleware = ContextMiddleware(inner)

    def asked(method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        text = json.dumps(body).encode() if not isinstance(body, bytes) else body
        pieces = [text[:5], text[5:]]
        answer: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        async def send(message: Any) -> None:
            answer.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(b"content-length", str(len(text)).encode()), (b"authorization", f"Bearer {key}".encode())],
            "app": SimpleNamespace(state=SimpleNamespace(vllm_config=config)),
        }
        asyncio.run(middleware(scope, receive, send))
        return answer[0]["status"], json.loads(answer[1]["body"])

    return asked


def test_a_named_context_goes_on_as_an_argument_of_vllm(folder: Path, tiny_model: PreTrainedModel) -> None:
    inner = Inner()
    ask = server(folder, tiny_model, inner)
    wish = {"prompt": "What?", "keepset": {"context": "manual"}, "vllm_xargs": {"more": 1}}
    assert ask("POST", "/v1/completions", wish)[0] == 200
    assert ask("POST", "/v1/completions", {"prompt": "What?"})[0] == 200
    assert inner.bodies == [
        {"prompt": "What?", "vllm_xargs": {"more": 1, "keepset": '{"context": "manual"}'}},
        {"prompt": "What?"},
    ]


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        ({"context": "nowhere"}, "There is no context 'nowhere' on this server; it has flipped, manual."),
        ({"context": "../manual"}, "There is no context '../manual' on this server"),
        ({"context": "flipped"}, "is damaged: build it again."),
        ({"context": 7}, "keepset is {'context': 7}: give {\"context\": NAME}, or leave it out."),
        ({}, "keepset is {}: give"),
        (None, "keepset is None: give"),
        ("manual", "keepset is 'manual': give"),
    ],
)
def test_what_is_wrong_is_answered_with_a_sentence(
    wishes: Any, sentence: str, folder: Path, tiny_model: PreTrainedModel
) -> None:
    inner = Inner()
    status, answer = server(folder, tiny_model, inner)("POST", "/v1/chat/completions", {"keepset": wishes})
    assert status == answer["error"]["code"] == 400 and sentence in answer["error"]["message"]
    assert not inner.bodies


def test_the_listing_follows_the_folder(
    folder: Path, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(stats.FOLDER, str(tmp_path))
    stats._array.cache_clear()
    stats.context_used("manual", loaded=True)
    stats.context_used("manual", loaded=False)
    ask = server(folder, tiny_model, Inner())
    (flipped, manual) = ask("GET", "/v1/contexts")[1]["data"]
    path = folder / "manual.safetensors"
    assert manual == {
        "id": "manual",
        "object": "context",
        "tokens": 100,
        "recipe": "knorm(keep=0.25)",
        "kept": 0.25,
        "bytes": path.stat().st_size,
        "requests": 2,
        "loads": 1,
    }
    assert (flipped["id"], flipped["requests"]) == ("flipped", 0)
    (folder / "another.safetensors").write_bytes(path.read_bytes())
    assert [each["id"] for each in ask("GET", "/v1/contexts")[1]["data"]] == ["another", "flipped", "manual"]
    (folder / "another.safetensors").unlink()
    assert ask("POST", "/v1/completions", {"keepset": {"context": "another"}})[0] == 400
    stats._array.cache_clear()


def test_who_has_no_key_is_told_nothing(folder: Path, tiny_model: PreTrainedModel) -> None:
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    ask = server(folder, tiny_model, AuthenticationMiddleware(Inner(), tokens=["secret"]))
    assert ask("GET", "/v1/contexts")[0] == 401
    assert ask("POST", "/v1/completions", {"keepset": {"context": "nowhere"}})[0] == 401
    assert ask("GET", "/v1/contexts", key="secret")[0] == 200
    assert ask("POST", "/v1/completions", {"keepset": {"context": "nowhere"}}, key="secret")[0] == 400
