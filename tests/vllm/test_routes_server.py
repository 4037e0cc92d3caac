"""A server with and without API keys, sent forged and wrong words on every route for a while.

Nothing that is forged is done, nothing that is wrong ends a request with an error of the server's or the server itself,
and after each an ordinary request is answered. KEEPSET_ROUTES_MINUTES says for how long each server is sent them,
KEEPSET_ROUTES_SEED which.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import keepset
from keepset.recipe import Recipe
from keepset.serving.command import command
from keepset.serving.context_api import HONOURED
from keepset.serving.server import Server, free_port
from keepset.vllm.owned_contexts import EVERYBODY, owner_of
from keepset.vllm.signing import SIGNING_KEY
from keepset.vllm.wishes import MAX_RANGES
from tests.vllm.engine import SPARING
from tests.vllm.serve import forked
from tests.vllm.test_soak import OPTIONS, tiny_and_tokenizer

pytestmark = pytest.mark.full

__all__ = ["tiny_and_tokenizer"]
MINUTES = float(os.environ.get("KEEPSET_ROUTES_MINUTES", "0.5"))
SEED = int(os.environ.get("KEEPSET_ROUTES_SEED", "1"))
PATIENCE = 20.0
"""Seconds in which anything is answered: a request that holds others would take minutes."""
RECIPE = "adakv(snapkv(window=8), keep=40, every=16)"
TEXT = list(range(300, 400))
CHAT = [{"role": "user", "content": "Tell me more"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT[:60], "max_tokens": 3},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/v1/chat/completions/batch": {"messages": [CHAT, CHAT], "max_tokens": 3},
    "/v1/responses": {"input": "Tell me more", "max_output_tokens": 3},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3},
    "/inference/v1/generate": {"token_ids": TEXT[:60], "sampling_params": {"max_tokens": 3}},
}
UNASKED = ("/scale_elastic_ep", "/fault_tolerance/apply")
"""Routes that would change the server: only words that are refused are sent there."""
MINE, OTHERS = owner_of("one"), owner_of("two")
SIGNATURE = re.compile("[0-9a-f]{64}")


@dataclass
class Asked:
    """One request: how it is sent, and which statuses may come back; None for any that is no error of the server's."""

    path: str
    body: bytes
    headers: dict[str, str]
    right: tuple[int, ...] | None
    chunked: bool = False


def forged(draw: random.Random) -> Any:
    """Words that nobody may say."""
    owner = draw.choice([MINE, OTHERS, EVERYBODY, "../..", 7, ""])
    some: dict[str, Any] = draw.choice([{"save": "theirs"}, {"context": "theirs"}, {"keep": 30}, {"off": True}, {}])
    words: Any = {**some, "owner": owner}
    if draw.random() < 0.2:
        words = {"save": "theirs", "ticket": "0" * 32, "owner": owner}
    if draw.random() < 0.5:
        words = json.dumps(words)
    if draw.random() < 0.3:
        words = f"{draw.randbytes(32).hex().upper()} {words if isinstance(words, str) else json.dumps(words)}"
    return words


def huge(draw: random.Random) -> Any:
    count = draw.choice([MAX_RANGES + 1, 20_000, 50_000])
    return {"protect": [[2 * i, 2 * i + 1] for i in range(count)]}


def wrong(draw: random.Random) -> Any:
    """Words of the wrong kind, or of more than a request may say."""
    deep: Any = 1
    for _ in range(draw.choice([50, 300, 600])):
        deep = [deep] if draw.random() < 0.5 else {"a": deep}
    number = draw.choice([10**30, -1, 0, 2**63, 2**64, 1e400, float("nan"), -0.5, 10**300, 4])
    return draw.choice(
        [
            "text", "", 7, [], [1], {}, True, None, deep, "[" * 3000,
            {"keep": number}, {"keep": "half"}, {"keep": True}, {"keep": [40]}, {"keep": deep}, {"keep": 0.5},
            {"protect": [[0, number]]}, {"protect": deep}, {"protect": "all"}, {"protect": [[5, 5]]},
            {"protect": [[1, 2, 3]]}, {"protect": [[None, 5]]}, {"protect": [["0", "5"]]}, {"protect": {"0": 5}},
            {"save": "../theirs"}, {"save": "n" * 5000}, {"save": "\ud800"}, {"save": ""}, {"save": 7}, {"save": "a\0b"},
            {"context": "nowhere"}, {"context": "n" * 5000}, {"context": "n" * 250}, {"context": "\ud800"},
            {"context": "../manual"}, {"context": "a\0b"}, {"context": deep}, {"context": ""}, {"context": "flipped"},
            {"context": "manual", "keep": 40}, {"off": True, "keep": 40}, {"off": 1}, {"more": 1}, {"keep": None},
            {"save": "a", "more": draw.randbytes(8).hex()}, huge(draw), json.dumps(huge(draw)),
        ]
    )  # fmt: skip


def right(draw: random.Random) -> Any:
    """Words that are served."""
    ranges = [[3 * i, 3 * i + draw.randrange(1, 4)] for i in range(draw.choice([1, 9, MAX_RANGES]))]
    some = [{"keep": 30}, {"off": True}, {"protect": ranges}, {"keep": 50, "protect": ranges}, {"save": "mine"}]
    return draw.choice([*some, {"save": "mine", "keep": 30}, {"context": "manual"}])


def said(draw: random.Random, path: str, keys: bool) -> Asked:
    """A random request to a route."""
    body = dict(BODIES.get(path) or draw.choice(list(BODIES.values())))
    body["model"] = "tiny"
    guarded = path.startswith(("/v1", "/v2", "/inference", "/cohere"))
    headers = {"content-type": "application/json", "authorization": "Bearer one"}
    if keys and draw.random() < 0.2:
        headers["authorization"] = draw.choice(
            ["Bearer nobody", "", "Bearer", "one", "Basic one", "Bearer two.", "Bearer  one"]
        )
    refused = 401 if keys and guarded and headers["authorization"] != "Bearer one" else 400
    kind = draw.choice(["forged", "forged", "forged", "wrong", "wrong", "huge", "right", "late", "raw"])
    expected: tuple[int, ...] | None = (refused,)
    if kind in ("forged", "huge"):
        words = forged(draw) if kind == "forged" else huge(draw)
        place = draw.choice(["top", "vllm_xargs", "extra_args", "sampling_params"])
        if place == "top":
            body["keepset"] = words
        elif place == "vllm_xargs":
            body["vllm_xargs"] = {"keepset": words, "more": 1}
        else:
            more = {"keepset": words}
            body["sampling_params"] = {
                "max_tokens": 3,
                **(more if place == "sampling_params" else {"extra_args": more}),
            }
    elif kind == "wrong":
        body["keepset"] = wrong(draw)
    elif kind == "right":
        body["keepset"] = right(draw)
        if path in HONOURED and refused == 400:
            expected = (200,)
    elif kind == "late":  # only the engine knows it
        body["keepset"] = {"context": "manual"}
        body |= draw.choice([{"prompt_logprobs": 1}, {"prompt": [5] * 290, "messages": [], "input": "word " * 300}])
        if path == "/v1/completions":
            body["stream"] = draw.random() < 0.5
        elif path not in ("/v1/chat/completions", "/v1/responses") or "prompt_logprobs" in body:
            body["keepset"] = {"context": "manual", "save": "mine"}
        expected = expected if path in ("/v1/completions",) or path not in HONOURED else None
    if draw.random() < 0.1:
        body["vllm_xargs"] = draw.choice(["text", [1], 7, {"seed": 10**30}, {"keepset": None}])
        expected = None if expected != (401,) else expected
    text = json.dumps(body).encode()
    if kind == "raw":
        double = (
            text[:-1] + b', "keepset": {"keep": 30}, "keepset": {"save": "theirs", "owner": "%b"}}' % OTHERS.encode()
        )
        text = draw.choice(
            [
                double,
                text[:-1] + b', "vllm_xargs": {"keepset": "{}"}, "vllm_xargs": {}}',
                text[:-1] + b', "\\u006beepset": {"owner": "everybody"}}',
                text[:-1] + b', "keepset": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
                text[:-1] + b', "keepset": {"keep": ' + b"9" * 5000 + b"}}",
                text[:-1] + b', "keepset": {"keep": NaN}}',
                text[:-1] + b', "keepset": {"keep": 1e999}}',
                text[:-1] + b', "keepset": {"keep": 30}',
                (text[:-1] + b', "keepset": {"off": 1}}').decode().encode("utf-16"),
                b"\xff\xfe" + text,
                b"", b"null", b"[]", b'"keepset"', b"{}", text[: len(text) // 2],
            ]
        )  # fmt: skip
        expected = None if expected != (401,) else expected
        if path in UNASKED:
            text = double
    if draw.random() < 0.05 and path not in UNASKED:
        headers["content-type"] = draw.choice(
            [
                "text/plain",
                "",
                "multipart/form-data; boundary=a",
                "application/json; charset=utf-16",
                "application/x+json",
            ]
        )
        expected = None if expected != (401,) else expected
    return Asked(path, text, headers, expected, chunked=draw.random() < 0.3)


class Proof:
    """Sends requests to a server and looks at what comes back."""

    def __init__(self, client: httpx.Client, server: Server, folder: Path, keys: bool) -> None:
        self._client, self._server, self._folder, self._keys = client, server, folder, keys
        self.counts: Counter[str] = Counter()
        paths = client.get("/openapi.json").json()["paths"]
        # Those that are hidden, and some that there are not.
        more = ["/inference/v1/generate", "/v1/chat/completions/render", "/v9/new", "//v1/completions"]
        self.paths = sorted({path for path, methods in paths.items() if "post" in methods} | {*more})
        self._secret = secret_of(server)

    def step(self, draw: random.Random) -> None:
        """Sends one random request, then an ordinary one."""
        asked = said(draw, draw.choice([*self.paths, *BODIES, "/invocations"]), self._keys)
        content: Any = asked.body
        if asked.chunked:
            content = iter([asked.body[:9], asked.body[9:50], asked.body[50:]])
        # What a cut body says comes to nothing, and so may some of what is sent after it.
        answered = self._client.post(asked.path, content=content, headers=asked.headers)
        status, text = answered.status_code, answered.text
        self.counts[f"answered {status}"] += 1
        place = f"{status} {asked.path} {asked.headers} {asked.body[:600]!r}\n{text[:2000]}"
        if asked.right is not None:
            assert status in asked.right or (status in (404, 405) and asked.path not in BODIES), place
        assert status < 500 or status == 501, place
        assert "Internal server error" not in text, place
        assert str(self._folder) not in text and self._secret not in text and not SIGNATURE.search(text), place
        self.ordinary()
        self.counts["requests"] += 1

    def ordinary(self) -> None:
        body = {"model": "tiny", "prompt": TEXT[:40], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        answer = self._client.post("/v1/completions", json=body, headers={"authorization": "Bearer one"})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3, answer.text
        self.counts["ordinary requests"] += 1

    def untouched(self) -> None:
        """Asserts that only who asked by right has saved anything."""
        owners = {path.name for path in (self._folder / "saved").glob("*")}
        assert owners <= {MINE if self._keys else EVERYBODY}
        names = {path.name.split("@")[0] for path in self._folder.glob("saved/*/*.safetensors")}
        assert names <= {"mine", "a"}
        log = self._server._text()
        assert self._secret not in log and "one two" not in log


def secret_of(server: Server) -> str:
    """The key with which the server's front end signs."""
    environment = Path(f"/proc/{server._process.pid}/environ").read_bytes().split(b"\0")
    (found,) = [each for each in environment if each.startswith(SIGNING_KEY.encode())]
    return found.decode().partition("=")[2]


@pytest.fixture(scope="module")
def folder(tiny_and_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contexts")
    model = AutoModelForCausalLM.from_pretrained(tiny_and_tokenizer)
    for name, text in (("manual", TEXT), ("flipped", TEXT[::-1])):
        cache = keepset.Cache(model, "knorm(keep=0.25)")
        with torch.no_grad():
            model(torch.tensor([text]), past_key_values=cache)
        cache.save(folder / f"{name}.safetensors", token_ids=text)
    content = bytearray((folder / "flipped.safetensors").read_bytes())
    content[-9] ^= 1
    (folder / "flipped.safetensors").write_bytes(content)
    return folder


@pytest.mark.parametrize("keys", [True, False], ids=["with keys", "without keys"])
def test_nothing_forged_is_done_and_nothing_wrong_ends_the_server(
    keys: bool, folder: Path, tiny_and_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = prove(tiny_and_tokenizer, folder, keys, monkeypatch)
    print(f"{'with' if keys else 'without'} keys, seed {SEED}:", ", ".join(f"{n} {what}" for what, n in counts))


def prove(model: Path, folder: Path, keys: bool, monkeypatch: pytest.MonkeyPatch) -> Sequence[tuple[str, int]]:
    """Sends a server requests for `MINUTES`; returns what was counted."""
    for name, value in SPARING.items():
        monkeypatch.setenv(name, value)
    for path in folder.glob("saved/*/*"):
        path.unlink()
    for path in folder.glob("saved/*"):
        path.rmdir()
    port = free_port()
    options = [*OPTIONS, *(["--api-key", "one", "two"] if keys else []), "--enable-log-requests"]
    words = command(str(model), Recipe.parse(RECIPE), options, ["--port", str(port)], contexts=folder, save_bytes=10**6)
    draw = random.Random(SEED)
    with Server(forked(words), port) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        server.wait(600)
        proof, until = Proof(client, server, folder, keys), time.monotonic() + 60 * MINUTES
        while time.monotonic() < until:
            proof.step(draw)
        server.check()
        proof.untouched()
    return sorted(proof.counts.items())
