"""Servers with contexts, saves, a recipe, and API keys or none, asked over HTTP.

Nothing that is forged is done, nothing that is wrong ends a request with an error of the server's or the server itself,
and after each an ordinary request is answered; see `tests.vllm.forgery`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from keepset.lab.server_process import ServerProcess
from keepset.vllm.stats import COUNTERS
from tests.vllm.forgery import Proof, prove, server_of

pytestmark = pytest.mark.full

Running = tuple[ServerProcess, httpx.Client, Path]
Ask = Any
DEPLOY = Path(__file__).parents[2] / "deploy"
STEPS = 40
REQUESTS, AT_ONCE = 80, 40
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


async def one(client: httpx.AsyncClient, rng: random.Random, gate: asyncio.Semaphore) -> bool:
    """Sends a request; either reads its whole answer and checks its length, or hangs up on the way."""
    prompt, tokens = rng.randint(1, 250), rng.randint(1, 120)
    hang_up = rng.choice([None, None, None, None, 0, rng.randint(1, tokens)])
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [rng.randrange(3, 49000) for _ in range(prompt)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with gate:
        seen = 0
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if hang_up is not None and seen >= hang_up:
                    return False
                data = line.removeprefix("data: ")
                if line.startswith("data: {"):
                    seen += 1
                    usage = json.loads(data).get("usage")
                    if usage:
                        assert usage["completion_tokens"] == tokens
                        assert usage["prompt_tokens"] == prompt
                elif data == "[DONE]":
                    return True
    raise AssertionError("an answer ended early")


async def soak(url: str) -> int:
    """The number of answers that were read whole."""
    rng, gate = random.Random(1), asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=httpx.Limits(max_connections=AT_ONCE)) as client:
        return sum(await asyncio.gather(*(one(client, rng, gate) for _ in range(REQUESTS))))


def test_a_server_loses_no_page_and_no_answer(without_keys: Running) -> None:
    """Under random load: lengths, closed connections, preemptions."""
    server, client, _ = without_keys
    answered = asyncio.run(soak(server.url))
    assert REQUESTS * 0.5 < answered < REQUESTS, "some must have been answered, and some hung up"
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
    assert min(sums[f"keepset:{name}_total"] for name in ("events", "blocks_freed", "entries_dropped")) > 60
    assert sums["keepset:seconds_total"] > 0
