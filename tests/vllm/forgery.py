"""Random requests to a server, forged, wrong and right, and what is asserted of each answer.

`python -m tests.vllm.forgery --minutes 60 --seed 1` sends them to a server with API keys for half of the time, and to
one without for the other half. It prints what was answered every minute, and ends with an error at the first violation.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2 as httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import keepset
from keepset.lab.server_process import ServerProcess
from keepset.serving.middleware import HONOURED
from keepset.vllm.contexts import EVERYBODY, owner_of
from keepset.vllm.request_options import MAX_RANGES, SIGNING_KEY, signed
from tests.hf.damage import flipped
from tests.proof import by_hand, take_steps
from tests.vllm.served import save_model, served

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
UNLISTED = ("/inference/v1/generate", "/v1/chat/completions/render", "/invocations", "/v9/new", "//v1/completions")
"""Routes that the server does not list, and some that it does not have."""
UNASKED = ("/scale_elastic_ep", "/fault_tolerance/apply")
"""Routes that would change the server: only words that are refused are sent there."""
GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Beginnings of the paths at which vLLM asks for a key."""
WRONG_KEYS = ["Bearer nobody", "", "Bearer", "one", "Basic one", "Bearer two.", "Bearer  one"]
MINE, OTHERS = owner_of("one"), owner_of("two")
SIGNATURE = re.compile("[0-9a-f]{64}")
REFUSED, SERVED, ANY = (400,), (200,), None
"""Which statuses may come back; `ANY` is every status that is no error of the server's."""
Expected = tuple[int, ...] | None


@dataclass(frozen=True)
class Drawn:
    """A request that was drawn."""

    kind: str
    path: str
    body: bytes
    headers: dict[str, str]
    expected: Expected
    chunked: bool = False


def forged_words(draw: random.Random) -> Any:
    """Return words that nobody may say."""
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


def huge_words(draw: random.Random) -> Any:
    """Return more ranges than a request may protect."""
    count = draw.choice([MAX_RANGES + 1, 20_000, 50_000])
    words = {"protect": [[2 * i, 2 * i + 1] for i in range(count)]}
    return json.dumps(words) if draw.random() < 0.3 else words


def wrong_words(draw: random.Random) -> Any:
    """Return words of the wrong kind, or of more than a request may say."""
    deep: Any = 1
    for _ in range(draw.choice([50, 300, 600])):
        deep = [deep] if draw.random() < 0.5 else {"a": deep}
    number = draw.choice([10**30, -1, 0, 2**63, 2**64, 1e400, float("nan"), -0.5, 10**300])
    keeps = [number, 4, "half", True, [40], deep, 0.5, None]
    ranges = [[[0, number]], deep, "all", [[5, 5]], [[1, 2, 3]], [[None, 5]], [["0", "5"]], {"0": 5}]
    saves = ["../theirs", "n" * 5000, "\ud800", "", 7, "a\0b"]
    contexts = ["folder", "nowhere", "n" * 5000, "n" * 250, "\ud800", "../manual", "a\0b", deep, "", "flipped"]
    together = [{"context": "manual", "keep": 40}, {"off": True, "keep": 40}, {"off": 1}, {"more": 1}]
    return draw.choice(
        [
            *("text", "", 7, [], [1], {}, True, None, deep, "[" * 3000),
            *({"keep": keep} for keep in keeps),
            *({"protect": some} for some in ranges),
            *({"save": name} for name in saves),
            *({"context": name} for name in contexts),
            *(*together, {"save": "a", "more": draw.randbytes(8).hex()}),
        ]
    )


def right_words(draw: random.Random) -> Any:
    """Return words that are served."""
    ranges = [[3 * i, 3 * i + draw.randrange(1, 4)] for i in range(draw.choice([1, 9, MAX_RANGES]))]
    some = [{"keep": 30}, {"off": True}, {"protect": ranges}, {"keep": 50, "protect": ranges}, {"save": "mine"}]
    return draw.choice([*some, {"save": "mine", "keep": 30}, {"context": "manual"}])


def hidden(draw: random.Random, body: dict[str, Any], words: Any) -> dict[str, Any]:
    """Return a body with these words in a place that vLLM hands on, or might hand on, to the engine."""
    said = {"keepset": words}
    places: list[dict[str, Any]] = [
        {"vllm_xargs": said},
        {"vllm_xargs": {**said, "more": 1}},
        {"sampling_params": {"max_tokens": 3, **said}},
        {"sampling_params": {"max_tokens": 3, "extra_args": said}},
    ]
    return {**body, **draw.choice(places)}


Draw = Callable[[random.Random, str, dict[str, Any]], tuple[bytes, Expected]]


def _forged(draw: random.Random, path: str, body: dict[str, Any]) -> tuple[bytes, Expected]:
    words = forged_words(draw) if draw.random() < 0.8 else huge_words(draw)
    body = {**body, "keepset": words} if draw.random() < 0.3 else hidden(draw, body, words)
    return json.dumps(body).encode(), REFUSED


def _replayed(draw: random.Random, path: str, body: dict[str, Any]) -> tuple[bytes, Expected]:
    """Words with a signature of this server's, as if somebody had seen one."""
    words = signed(json.dumps({"save": "theirs", "owner": draw.choice([MINE, OTHERS, EVERYBODY])}))
    body = {**body, "keepset": words} if draw.random() < 0.3 else hidden(draw, body, words)
    return json.dumps(body).encode(), REFUSED


def _wrong(draw: random.Random, path: str, body: dict[str, Any]) -> tuple[bytes, Expected]:
    words = wrong_words(draw) if draw.random() < 0.8 else huge_words(draw)
    return json.dumps({**body, "keepset": words}).encode(), REFUSED


def _right(draw: random.Random, path: str, body: dict[str, Any]) -> tuple[bytes, Expected]:
    body = {**body, "keepset": right_words(draw)}
    return json.dumps(body).encode(), SERVED if path in HONOURED else REFUSED


def _late(draw: random.Random, path: str, body: dict[str, Any]) -> tuple[bytes, Expected]:
    """Words that only the engine knows to be wrong."""
    words = {"context": "manual"}
    more = draw.choice([{"prompt_logprobs": 1}, {"prompt": [5] * 290, "messages": [], "input": "word " * 300}])
    body = {**body, **more}
    expected: Expected = ANY if path in HONOURED else REFUSED
    if path == "/v1/completions":
        body["stream"], expected = draw.random() < 0.5, REFUSED
    elif path not in ("/v1/chat/completions", "/v1/responses") or "prompt_logprobs" in body:
        words["save"] = "mine"
    return json.dumps({**body, "keepset": words}).encode(), expected


def _arguments(draw: random.Random, path: str, body: dict[str, Any]) -> tuple[bytes, Expected]:
    """Arguments of vLLM's that are wrong, beside words that are right."""
    wrong = draw.choice(["text", [1], 7, {"seed": 10**30}, {"keepset": None}, {"a": {"keepset": {"off": True}}}])
    return json.dumps({**body, "vllm_xargs": wrong, "keepset": right_words(draw)}).encode(), ANY


def _text(draw: random.Random, path: str, body: dict[str, Any]) -> tuple[bytes, Expected]:
    """JSON that no library writes, and what is none."""
    text = json.dumps(body).encode()
    twice = text[:-1] + b', "keepset": {"keep": 30}, "keepset": {"save": "theirs", "owner": "%b"}}' % OTHERS.encode()
    if path in UNASKED:
        return twice, ANY
    ends = [
        b', "vllm_xargs": {"keepset": "{}"}, "vllm_xargs": {}}',
        b', "vllm_xargs": {}, "vllm_xargs": {"keepset": "{\\"save\\": \\"theirs\\"}"}}',
        b', "vllm_xargs": {"k\\u0065epset": "{\\"save\\": \\"theirs\\"}"}}',
        b', "\\u006beepset": {"owner": "everybody"}}',
        b', "keepset": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b', "keepset": {"keep": ' + b"9" * 5000 + b"}}",
        *(b', "keepset": {"keep": %b}}' % number for number in (b"NaN", b"1e999", b"-0", b"0x10", b"1_0")),
        b', "keepset": {"keep": 30}',
    ]
    whole = [twice, b"\xff\xfe" + text, b"", b"null", b"[]", b'"keepset"', b"{}", text[: len(text) // 2]]
    other = [(text[:-1] + b', "keepset": {"off": 1}}').decode().encode(code) for code in ("utf-16", "utf-32-be")]
    packed = gzip.compress(text[:-1] + b', "vllm_xargs": {"keepset": "{}"}}')
    return draw.choice([*(text[:-1] + end for end in ends), *whole, *other, packed]), ANY


KINDS: dict[str, tuple[int, Draw]] = {
    "forged": (3, _forged),
    "replayed": (1, _replayed),
    "wrong": (3, _wrong),
    "right": (1, _right),
    "late": (1, _late),
    "arguments": (1, _arguments),
    "text": (1, _text),
}
"""How often each kind is drawn, and what draws it."""
CONTENT_TYPES = [
    *("text/plain", "", "application/x+json", "application/json; charset=utf-16", "application/x-www-form-urlencoded"),
    "multipart/form-data; boundary=a",
]


def drawn(draw: random.Random, path: str, keys: bool) -> Drawn:
    """Return a random request to a route of a server, with or without keys."""
    kind = draw.choices(list(KINDS), [often for often, _ in KINDS.values()])[0]
    if path in UNASKED and kind == "arguments":
        kind = "forged"
    body = {**(BODIES.get(path) or draw.choice(list(BODIES.values()))), "model": "tiny"}
    text, expected = KINDS[kind][1](draw, path, body)
    headers = {"content-type": "application/json", "authorization": "Bearer one"}
    if path not in UNASKED and draw.random() < 0.08:
        kind, expected = "other content type", ANY
        headers["content-type"] = draw.choice(CONTENT_TYPES)
        if draw.random() < 0.3:
            headers["content-encoding"] = "gzip"
    if keys and draw.random() < 0.2:
        headers["authorization"] = draw.choice(WRONG_KEYS)
        if path.startswith(GUARDED):
            kind, expected = "wrong key", (401,)
    return Drawn(kind, path, text, headers, expected, draw.random() < 0.3)


METHODS = ["POST", "POST", "POST", "PUT", "PATCH", "DELETE", "GET", "HEAD", "OPTIONS", "post", "KEEPSET"]


def wires(draw: random.Random, request: Drawn) -> bytes:
    """Return a request as it is sent, with another path or method, in an odd frame, or ahead of another one."""
    path, body = request.path, request.body
    odd = [
        *(f"/{path}", f"{path}/", f"/.{path}", f"/v9/..{path}", f"{path}?keepset=1", f"{path};a", f"http://a{path}"),
        *(path.replace("c", "%63"), path.replace("/", "%2f"), path.upper(), f"{path}%00", f"{path}#a", path),
    ]
    length = f"content-length: {len(body)}\r\n".encode()
    frames = [
        length + b"\r\n" + body,
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
        length + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
        b"content-length: 3\r\n" + length + b"\r\n" + body,
        b"\r\n" + body,
    ]
    some = [b"", b"x-forwarded-prefix: /v9\r\n", b"host: b\r\n", b"content-type: text/plain\r\n"]
    head = f"{draw.choice(METHODS)} {draw.choice(odd)} HTTP/1.1\r\nhost: a\r\n".encode()
    headers = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items()).encode()
    last = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    return head + headers + draw.choice(some) + draw.choice(frames) + last


class Proof:
    """Sends random requests to a server and asserts what comes back.

    `counts` says how often each route, and each kind of request, was answered with each status.
    """

    def __init__(self, client: httpx.Client, server: ServerProcess, folder: Path, keys: bool) -> None:
        self._client, self._server, self._folder, self._keys = client, server, folder, keys
        self.counts: Counter[str] = Counter()
        listed = client.get("/openapi.json").json()["paths"]
        posted = {path for path, methods in listed.items() if "post" in methods}
        self.paths = sorted({*posted, *UNLISTED, *BODIES})
        self._secret, self._read = secret_of(server), 0

    def step(self, seed: str) -> None:
        """Send one random request, then an ordinary one."""
        draw = random.Random(seed)
        # Routes that take words are as many as the others.
        path = draw.choice([draw.choice(self.paths), draw.choice(list(BODIES))])
        request = drawn(draw, path, self._keys)
        if path not in UNASKED and draw.random() < 0.15:
            self._send_odd(draw, request)
        else:
            self._send(request)
        self._ordinary()
        self._look()

    def _send(self, request: Drawn) -> None:
        content: Any = request.body
        if request.chunked:
            content = iter([request.body[:9], request.body[9:50], request.body[50:]])
        answered = self._client.post(request.path, content=content, headers=request.headers)
        status = answered.status_code
        missing = status in (404, 405) and request.path not in BODIES
        as_expected = request.expected is None or status in request.expected or missing
        self._check(request, [status], answered.text, as_expected)

    def _send_odd(self, draw: random.Random, request: Drawn) -> None:
        request = replace(request, kind="odd frame", headers={**request.headers, "authorization": "Bearer one"})
        sent, pieces, was_reset = wires(draw, request), [], False
        url = httpx.URL(self._server.url)
        with socket.create_connection((url.host, url.port), PATIENCE) as connection:
            try:
                connection.sendall(sent)
                while piece := connection.recv(2**16):
                    pieces.append(piece)
            except ConnectionError:  # it is closed at once after a frame that is wrong, whatever follows
                was_reset = True
        text = b"".join(pieces).decode(errors="replace")
        statuses = [int(status) for status in re.findall(r"HTTP/1\.1 (\d{3})", text)]
        self._check(replace(request, body=sent), statuses, text, bool(statuses) or was_reset)

    def _check(self, request: Drawn, statuses: list[int], text: str, as_expected: bool) -> None:
        for status in statuses:
            self.counts[f"{request.path} {status}"] += 1
            self.counts[f"({request.kind}) {status}"] += 1
        place = f"{request.kind} {statuses} {request.path} {request.headers} {request.body[:900]!r}\n{text[:2000]}"
        assert as_expected, place
        assert all(status < 500 or status == 501 for status in statuses), place
        assert "Internal server error" not in text, place
        assert str(self._folder)[:12] not in text and self._secret not in text and not SIGNATURE.search(text), place

    def _ordinary(self) -> None:
        body = {"model": "tiny", "prompt": TEXT[:40], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        answer = self._client.post("/v1/completions", json=body, headers={"authorization": "Bearer one"})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3, answer.text

    def _look(self) -> None:
        """Assert that the server lives, that nobody saved anything but by right, and that the log shows no key."""
        self._server.check()
        owners = {path.name for path in (self._folder / "saved").glob("[!.]*")}
        assert owners <= {MINE if self._keys else EVERYBODY}, owners
        names = {path.name.split("@")[0] for path in self._folder.glob("saved/*/*.safetensors")}
        assert names <= {"mine", "a"}, names
        log = os.pread(self._server._log.fileno(), 2**30, self._read)
        self._read += len(log)
        assert self._secret.encode() not in log


def secret_of(server: ServerProcess) -> str:
    """Return the key with which the server's front end signs."""
    environment = Path(f"/proc/{server._process.pid}/environ").read_bytes().split(b"\0")
    (found,) = [each for each in environment if each.startswith(SIGNING_KEY.encode())]
    return found.decode().partition("=")[2]


def save_contexts(model_folder: Path, folder: Path) -> None:
    """Save a context that can be served, and a damaged one."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    for name, text in (("manual", TEXT), ("flipped", TEXT[::-1])):
        cache = keepset.Cache(model, "knorm(keep=0.25)")
        with torch.no_grad():
            model(torch.tensor([text]), past_key_values=cache)
        cache.save(folder / f"{name}.safetensors", token_ids=text)
    (folder / "folder.safetensors").mkdir()
    path = folder / "flipped.safetensors"
    path.write_bytes(flipped(path.read_bytes(), "layers.0.columns.keys"))


@contextmanager
def server_of(model: Path, folder: Path, keys: bool) -> Iterator[tuple[ServerProcess, httpx.Client]]:
    """A server with contexts, saves and, if wanted, two API keys, and a client of it; `folder` must be empty."""
    save_contexts(model, folder)
    options = [*(["--api-key", "one", "two"] if keys else []), "--enable-log-requests", "--enable-prompt-embeds"]
    with served(model, RECIPE, options, PATIENCE, contexts=folder, save_bytes=10**7) as running:
        yield running


def prove(proof: Proof, server: ServerProcess, seed: int, steps: range, minutes: float | None = None) -> None:
    """Send random requests to a server, for some minutes at most; print every minute what was answered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIGNING_KEY, secret_of(server))  # requests are drawn with signatures of this server's, too
        take_steps(proof.step, proof.counts, seed, steps, minutes, show=True)


def prove_both(seed: int, steps: range, minutes: float) -> Counter[str]:
    """Send random requests to a server with keys and to one without; return what was answered."""
    counts: Counter[str] = Counter()
    for keys in (True, False):
        with TemporaryDirectory() as place:
            model, folder = save_model(Path(place) / "tiny", tie_word_embeddings=True), Path(place) / "contexts"
            folder.mkdir()
            with server_of(model, folder, keys) as (server, client):
                proof = Proof(client, server, folder, keys)
                prove(proof, server, seed, steps, minutes / 2)
                counts += proof.counts
    return counts


if __name__ == "__main__":
    by_hand(prove_both)
