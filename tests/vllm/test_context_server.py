"""A server with contexts, a recipe, saves and two API keys, asked over HTTP."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import keepset
from tests.vllm.served import served

pytestmark = pytest.mark.full

TEXT = list(range(300, 400))
RECIPE = "adakv(snapkv(window=8), keep=40, every=16)"
Ask = Any


@pytest.fixture(scope="module")
def ask(tiny_and_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    folder = tmp_path_factory.mktemp("contexts")
    model = AutoModelForCausalLM.from_pretrained(tiny_and_tokenizer)
    cache = keepset.Cache(model, "knorm(keep=0.25)")
    with torch.no_grad():
        model(torch.tensor([TEXT]), past_key_values=cache)
    cache.save(folder / "manual.safetensors", token_ids=TEXT)
    options = ["--enable-prompt-embeds", "--api-key", "one", "two"]
    with served(tiny_and_tokenizer, RECIPE, options, contexts=folder, save_bytes=10**7) as (server, client):

        def asked(path: str, key: str = "one", **body: Any) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            if not body:
                return client.get(path, headers=headers).json()["data"]
            more = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = client.post(path, headers=headers, json=more | body)
            if body.get("stream"):
                return answer.status_code, answer.text
            return (
                answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"]["message"])
            )

        yield asked
        server.check()


def test_questions_saves_and_tenants(ask: Ask) -> None:
    completions, chats = "/v1/completions", "/v1/chat/completions"
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
        assert status == 400 and "there must be one at least, and with an answer no more than the 384" in sentence
    assert ask(completions, prompt="a", keepset={"keep": 0.5})[0] == 400
    assert ask(completions, prompt="a", keepset={"keep": 30})["choices"]
    assert ask(completions, prompt="a", keepset={"off": True})["choices"]

    messages = [{"role": "user", "content": "Tell me about " + "the sea and the wind " * 12}]
    first = ask(chats, messages=messages, keepset={"save": "chat"})
    messages.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
    messages.append({"role": "user", "content": "And then?"})
    names: list[str] = []
    for _ in range(600):
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


def test_a_prompt_of_embeddings_has_no_context(ask: Ask) -> None:
    stored = io.BytesIO()
    torch.save(torch.randn(20, 64), stored)
    embeds = base64.b64encode(stored.getvalue()).decode()
    assert ask("/v1/completions", prompt_embeds=embeds, keepset={"keep": 30})["choices"]
    for words in ({"context": "manual"}, {"save": "embedded"}):
        status, sentence = ask("/v1/completions", prompt_embeds=embeds, keepset=words)
        assert status == 400 and "tokens, not embeddings" in sentence


def test_a_stream_that_has_begun_ends_with_the_refusal(ask: Ask) -> None:
    status, text = ask("/v1/responses", input="What?", stream=True, keepset={"context": "manual", "save": "a"})
    assert status == 200 and "What follows context 'manual' cannot be saved" in text.splitlines()[-2]


def test_a_prompt_of_tokens_goes_on(ask: Ask) -> None:
    said = list(range(1000, 1150))
    answer = ask("/v1/completions", prompt=said, keepset={"save": "tokens"}, return_token_ids=True)
    tokens = answer["choices"][0]["token_ids"]
    for _ in range(600):
        if "tokens" in [each["id"] for each in ask("/v1/contexts")]:
            break
        time.sleep(0.1)
    more = [*said, *tokens, 5, 6, 7]
    assert ask("/v1/completions", prompt=more, keepset={"context": "tokens"})["choices"]
    assert ask("/v1/completions", prompt=more)["choices"]
    assert ask("/v1/completions", "two", prompt=more)["choices"]
    used = {each["id"]: each["requests"] for each in ask("/v1/contexts")}
    assert used["tokens"] == 2
