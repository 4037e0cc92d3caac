"""Servers with contexts, saves, a recipe, and API keys or none, asked over HTTP.

Nothing that is forged is done, nothing that is wrong ends a request with an error of the server's or the server itself,
and after each an ordinary request is answered; see `tests.vllm.forgery`. A signal while vLLM starts ends
`keepset serve` and all that it has started.
"""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from keepset.lab.server_process import ServerProcess, free_port
from keepset.vllm.stats import COUNTERS
from tests.vllm.forgery import Proof, prove, server_of
from tests.vllm.processes import ROOT, SPARING
from tests.vllm.served import OPTIONS

pytestmark = pytest.mark.full

Running = tuple[ServerProcess, httpx.Client, Path]
Ask = Any
DEPLOY = Path(__file__).parents[2] / "deploy"
STEPS = 40
OPEN = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@pytest.fixture(scope="module")
def with_keys(tiny_and_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("contexts")
    with server_of(tiny_and_tokenizer, folder, keys=True) as (server, client):
        yield server, client, folder


@pytest.fixture(scope="module")
def without_keys(tiny_and_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("contexts")
    with server_of(tiny_and_tokenizer, folder, keys=False) as (server, client):
        yield server, client, folder


@pytest.fixture
def ask(with_keys: Running) -> Ask:
    server, client, _ = with_keys

    def asked(path: str, key: str = "one", **body: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        if not body:
            return {each["id"]: each["requests"] for each in client.get(path, headers=headers).json()["data"]}
        more = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = client.post(path, headers=headers, json=more | body)
        server.check()
        if body.get("stream"):
            return answer.status_code, answer.text
        return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"]["message"])

    return asked


def wait_for(ask: Ask, name: str) -> None:
    """Wait until a context is saved."""
    for _ in range(600):
        if name in ask("/v1/contexts"):
            return
        time.sleep(0.1)
    raise AssertionError(f"{name} was not saved")


@pytest.mark.parametrize("keys", [True, False], ids=["with keys", "without keys"])
def test_nothing_forged_is_done_and_nothing_wrong_ends_the_server(keys: bool, request: pytest.FixtureRequest) -> None:
    server, client, folder = request.getfixturevalue("with_keys" if keys else "without_keys")
    prove(Proof(client, server, folder, keys), server, 1, range(STEPS))


def test_questions_saves_and_tenants(ask: Ask) -> None:
    completions, chats = "/v1/completions", "/v1/chat/completions"
    used_before = ask("/v1/contexts")["manual"]
    plain = {"prompt": [7, 8, 9], "keepset": {"context": "manual"}}
    assert ask(completions, **plain)["choices"][0]["finish_reason"] == "length"
    # Too long with its context, in each form.
    long = "word " * 290
    for path, body in (
        (completions, {"prompt": [5] * 290}),
        (completions, {"prompt": long}),
        (chats, {"messages": [{"role": "user", "content": long}]}),
    ):
        status, sentence = ask(path, **body, keepset={"context": "manual"})
        assert status == 400 and "a question needs at least one, and all with an answer at most the 384" in sentence
    assert ask(completions, prompt="a", keepset={"keep": 0.5})[0] == 400
    assert ask(completions, prompt="a", keepset={"keep": 30})["choices"]
    assert ask(completions, prompt="a", keepset={"off": True})["choices"]

    messages = [{"role": "user", "content": "Tell me about " + "the sea and the wind " * 12}]
    first = ask(chats, messages=messages, keepset={"save": "chat"})
    messages.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
    messages.append({"role": "user", "content": "And then?"})
    wait_for(ask, "chat")
    assert "chat" not in ask("/v1/contexts", "two") and "manual" in ask("/v1/contexts", "two")
    status, sentence = ask(chats, "two", messages=messages, keepset={"context": "chat"})
    assert status == 400 and "There is no context 'chat'" in sentence
    status, sentence = ask(chats, messages=messages[-1:], keepset={"context": "chat"})
    assert status == 400 and "does not begin with" in sentence
    assert ask(chats, messages=messages[:1], keepset={"context": "chat", "owner": "0" * 32})[0] == 400
    assert ask(chats, messages=messages[:1], vllm_xargs={"keepset": '{"save": "x"}'})[0] == 400
    used = ask("/v1/contexts")
    assert used["chat"] == 0 and used["manual"] == used_before + 1


def test_usage_has_all_tokens_on_every_route(ask: Ask, with_keys: Running) -> None:
    """Those of the context that a question is asked about, which were in a cache."""
    _, client, _ = with_keys
    listed = client.get("/v1/contexts", headers={"authorization": "Bearer one"}).json()["data"]
    (tokens,) = {each["tokens"] for each in listed if each["id"] == "manual"}
    user, words = {"role": "user", "content": "What?"}, {"keepset": {"context": "manual"}}
    for path, body, names in (
        ("/v1/completions", {"prompt": [7, 8, 9]}, ("prompt_tokens", "prompt_tokens_details")),
        (
            "/v1/completions",
            {"prompt": [7, 8, 9], "n": 2, "temperature": 1},
            ("prompt_tokens", "prompt_tokens_details"),
        ),
        ("/v1/chat/completions", {"messages": [user]}, ("prompt_tokens", "prompt_tokens_details")),
        ("/v1/responses", {"input": "What?", "max_output_tokens": 8}, ("input_tokens", "input_tokens_details")),
        ("/v1/messages", {"messages": [user]}, ("input_tokens", None)),
    ):
        usage, plain = (ask(path, **body, **more)["usage"] for more in (words, {}))
        said, details = names
        if details is None:
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == plain["input_tokens"] + tokens
            continue
        assert usage[said] == plain[said] + tokens and usage[details]["cached_tokens"] >= tokens
        assert usage["total_tokens"] == plain["total_tokens"] + tokens


def test_a_prompt_of_embeddings_has_no_context(ask: Ask) -> None:
    stored = io.BytesIO()
    torch.save(torch.randn(20, 64), stored)
    embeds = base64.b64encode(stored.getvalue()).decode()
    assert ask("/v1/completions", prompt_embeds=embeds, keepset={"keep": 30})["choices"]
    for words in ({"context": "manual"}, {"save": "embedded"}):
        status, sentence = ask("/v1/completions", prompt_embeds=embeds, keepset=words)
        assert status == 400 and "tokens, not embeddings" in sentence


def test_the_smoke_test_passes_and_all_counters_are_served(with_keys: Running) -> None:
    """And it fails with the first answer that is not as it should be."""
    _, client, _ = with_keys
    for key, code in (("one", 0), ("none", 1)):
        done = subprocess.run(
            ["sh", DEPLOY / "smoke.sh", str(client.base_url).rstrip("/")],
            env={**os.environ, "VLLM_API_KEY": key},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
    served = set(re.findall(r"^\w+:\w+", client.get("/metrics").text, re.MULTILINE))
    assert {f"keepset:{counter}_total" for counter in COUNTERS} | {"keepset:recipe"} <= served


def test_a_stream_that_has_begun_ends_with_the_refusal(ask: Ask) -> None:
    status, text = ask("/v1/responses", input="What?", stream=True, keepset={"context": "manual", "save": "a"})
    assert status == 200 and "A request that only names context 'manual' cannot be saved" in text.splitlines()[-2]


def test_a_prompt_of_tokens_goes_on(ask: Ask) -> None:
    said = list(range(1000, 1150))
    answer = ask("/v1/completions", prompt=said, keepset={"save": "tokens"}, return_token_ids=True)
    tokens = answer["choices"][0]["token_ids"]
    wait_for(ask, "tokens")
    more = [*said, *tokens, 5, 6, 7]
    assert ask("/v1/completions", prompt=more, keepset={"context": "tokens"})["choices"]
    assert ask("/v1/completions", prompt=more)["choices"]
    assert ask("/v1/completions", "two", prompt=more)["choices"]
    assert ask("/v1/contexts")["tokens"] == 2


def test_who_hangs_up_leaves_nothing(without_keys: Running) -> None:
    server, client, _ = without_keys
    body = {"model": "tiny", "prompt": list(range(300, 400)), "max_tokens": 250, "ignore_eos": True, "stream": True}
    for number in range(4):
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line, _ in zip(answer.iter_lines(), range(40 * number + 1), strict=False):
                assert not line or line.startswith("data: {")
    for _ in range(60):
        sums: Counter[str] = Counter()
        for family in text_string_to_metric_families(client.get("/metrics").text):
            for sample in family.samples:
                sums[sample.name] += sample.value
        if (left := [sums[f"vllm:{name}"] for name in OPEN]) == [0, 0, 0]:
            break
        time.sleep(0.5)
    server.check()
    assert left == [0, 0, 0] and {f"vllm:{name}" for name in OPEN} <= {*sums}
    assert min(sums[f"keepset:{name}_total"] for name in ("events", "blocks_freed", "entries_dropped", "seconds")) > 0


PATIENCE = 300.0
MARK = "KEEPSET_TEST_OF_SIGNALS"


def living(mark: str) -> list[int]:
    """Return the processes that have this in their environments, other than those that are dead and not yet buried."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            marked = f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes()
            if marked and (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(int(folder.name))
    return found


@contextmanager
def starting(model: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A `keepset serve` that has just been started."""
    words = ["serve", str(model), "--recipe", "snapkv(window=8, keep=40, every=24)", "--port", str(free_port())]
    more = {**SPARING, MARK: str(log), "PYTHONPATH": str(ROOT)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "keepset", *words, *OPTIONS],
            env=os.environ | more,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.kill()
            for pid in living(str(log)):
                os.kill(pid, signal.SIGKILL)
            process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_signal_ends_all_that_was_started(tiny_and_tokenizer: Path, tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("launcher", "engine")]
    with starting(tiny_and_tokenizer, logs[0]) as early, starting(tiny_and_tokenizer, logs[1]) as late:
        # Supervisor and launcher come first, then an engine's processes, for which the launcher waits.
        for process, log, count, number in ((early, logs[0], 2, signal.SIGINT), (late, logs[1], 4, signal.SIGTERM)):
            until = time.monotonic() + PATIENCE
            while len(living(str(log))) < count:
                assert time.monotonic() < until and process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.1)
            time.sleep(1.0)
            process.send_signal(number)
            assert process.wait(60) != 0 and not living(str(log))
