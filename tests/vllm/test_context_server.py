"""A server with contexts, a recipe, saves and two API keys, asked over HTTP, and under random load."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import keepset
from keepset.models import embedded_folder
from keepset.recipe import Recipe
from keepset.serving.command import command
from keepset.serving.metrics import parse_sample
from keepset.serving.server import Server, free_port
from tests.vllm.test_soak import AT_ONCE, REQUESTS

pytestmark = pytest.mark.full

OPTIONS = ["--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny"]
OPTIONS += ["--block-size", "32", "--num-gpu-blocks-override", "48", "--max-model-len", "384"]
OPTIONS += ["--max-num-seqs", "24", "--max-num-batched-tokens", "128"]
TEXT = list(range(300, 400))
RECIPE = "adakv(snapkv(window=8), keep=40, every=16)"
Ask = Any


@pytest.fixture(scope="module")
def tiny_and_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers, with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=49152,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in (*embedded_folder().glob("tokenizer*"), *embedded_folder().glob("chat_template*")):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def server(tiny_and_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("contexts"), free_port()
    model = AutoModelForCausalLM.from_pretrained(tiny_and_tokenizer)
    cache = keepset.Cache(model, "knorm(keep=0.25)")
    with torch.no_grad():
        model(torch.tensor([TEXT]), past_key_values=cache)
    cache.save(folder / "manual.safetensors", token_ids=TEXT)
    options, forced = [*OPTIONS, "--api-key", "one", "two"], ["--port", str(port)]
    words = command(str(tiny_and_tokenizer), Recipe.parse(RECIPE), options, forced, contexts=folder, save_bytes=10**7)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with Server(words, port) as server:
            server.wait(240)
            yield server
            server.check()


def authorized(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def ask(server: Server) -> Iterator[Ask]:
    """A way to ask it."""
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def asked(path: str, key: str = "one", **body: Any) -> Any:
            headers = authorized(key)
            if not body:
                return client.get(path, headers=headers).json()["data"]
            more = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = client.post(path, headers=headers, json=more | body)
            return (
                answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"]["message"])
            )

        yield asked


def test_questions_saves_and_tenants(ask: Ask) -> None:
    completions, chats = "/v1/completions", "/v1/chat/completions"
    plain = {"prompt": [7, 8, 9], "keepset": {"context": "manual"}}
    assert ask(completions, **plain)["choices"][0]["finish_reason"] == "length"
    # Too long with its context, in each form.
    long = "word " * 400
    for path, body in (
        (completions, {"prompt": [5] * 290}),
        (completions, {"prompt": long}),
        (chats, {"messages": [{"role": "user", "content": long}]}),
    ):
        status, sentence = ask(path, **body, keepset={"context": "manual"})
        assert status == 400 and "there must be one at least, and with an answer no more than the 384" in sentence
    assert ask(completions, prompt="a", keepset={"keep": 0.5})[0] == 400
    assert ask(completions, prompt="a", keepset={"keep": 30})["choices"]
    assert ask(completions, prompt="a", keepset={"off": True})["choices"]

    messages = [{"role": "user", "content": "Tell me about " + "the sea and the wind " * 12}]
    first = ask(chats, messages=messages, keepset={"save": "chat"})
    messages.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
    messages.append({"role": "user", "content": "And then?"})
    names: list[str] = []
    for _ in range(50):
        names = [each["id"] for each in ask("/v1/contexts")]
        if "chat" in names:
            break
        time.sleep(0.1)
    assert names == ["chat", "manual"] and [each["id"] for each in ask("/v1/contexts", "two")] == ["manual"]
    status, sentence = ask(chats, "two", messages=messages, keepset={"context": "chat"})
    assert status == 400 and "There is no context 'chat'" in sentence
    status, sentence = ask(chats, messages=messages[-1:], keepset={"context": "chat"})
    assert status == 400 and "does not begin with" in sentence
    assert ask(chats, messages=messages[:1], keepset={"context": "chat", "owner": "0" * 32})[0] == 400
    assert ask(chats, messages=messages[:1], vllm_xargs={"keepset": '{"save": "x"}'})[0] == 400
    assert [each["requests"] for each in ask("/v1/contexts")] == [0, 1]


def test_a_prompt_of_tokens_goes_on(ask: Ask) -> None:
    said = list(range(1000, 1150))
    answer = ask("/v1/completions", prompt=said, keepset={"save": "tokens"}, return_token_ids=True)
    tokens = answer["choices"][0]["token_ids"]
    for _ in range(50):
        if "tokens" in [each["id"] for each in ask("/v1/contexts")]:
            break
        time.sleep(0.1)
    more = [*said, *tokens, 5, 6, 7]
    assert ask("/v1/completions", prompt=more, keepset={"context": "tokens"})["choices"]
    assert ask("/v1/completions", prompt=more)["choices"]
    assert ask("/v1/completions", "two", prompt=more)["choices"]
    used = {each["id"]: each["requests"] for each in ask("/v1/contexts")}
    assert used["tokens"] == 2


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


async def soak(url: str, seed: int) -> int:
    rng, gate = random.Random(seed), asyncio.Semaphore(AT_ONCE)
    options: Any = {"timeout": 120.0, "limits": httpx.Limits(max_connections=AT_ONCE), "headers": authorized("one")}
    async with httpx.AsyncClient(base_url=url, **options) as client:
        return sum(await asyncio.gather(*(one(client, rng, gate) for _ in range(REQUESTS))))


def test_under_random_load_no_page_and_no_answer_is_lost(server: Server) -> None:
    """Lengths, closed connections, preemptions."""
    answered = asyncio.run(soak(server.url, seed=1))
    assert REQUESTS * 0.5 < answered < REQUESTS, "some must have been answered, and some hung up"
    with httpx.Client(base_url=server.url) as client:
        for _ in range(60):
            sample = parse_sample(client.get("/metrics").text, time.monotonic())
            if sample.running == 0 and sample.waiting == 0 and sample.kv_usage == 0:
                break
            time.sleep(0.5)
    server.check()
    assert (sample.running, sample.waiting, sample.kv_usage) == (0, 0, 0)
    assert sample.counters["events"] > 100
    assert sample.counters["blocks_freed"] > 100
    assert sample.counters["entries_dropped"] > 0
    assert sample.counters["seconds"] > 0
