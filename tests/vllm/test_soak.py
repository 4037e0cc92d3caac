"""Engines, and a server, under random load: lengths, closed connections, preemptions.

No page is lost, every answer comes.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from keepset.serving.metrics import parse_sample
from tests.vllm.compared import answers_of, result
from tests.vllm.engine import Ask, Scenario
from tests.vllm.served import served

pytestmark = pytest.mark.full

RECIPES = ["snapkv(window=8, keep=40, every=24)", "adakv(tova, keep=64, every=48)"]
REQUESTS = 120
AT_ONCE = 40
# So few blocks that requests wait and are preempted, as in the server's options.
ENGINE = {"num_gpu_blocks_override": 48, "max_model_len": 384, "max_num_seqs": 24, "max_num_batched_tokens": 128}


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
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=httpx.Limits(max_connections=AT_ONCE)) as client:
        return sum(await asyncio.gather(*(one(client, rng, gate) for _ in range(REQUESTS))))


def random_asks(rng: random.Random) -> list[Ask]:
    """The same load for an engine: some requests come at once, some are aborted while they wait or run."""
    asks = []
    for number in range(REQUESTS):
        tokens, add = rng.randint(1, 120), max(0, number - AT_ONCE) * 4
        abort = rng.choice([None, None, None, None, add, add + rng.randint(1, 2 * tokens)])
        asks.append(Ask([rng.randrange(3, 512) for _ in range(rng.randint(1, 250))], tokens, add, abort))
    return asks


@pytest.fixture(scope="module")
def engines(tiny: Path) -> dict[str, Any]:
    some, engine = random_asks(random.Random(1)), ENGINE | {"model": str(tiny)}
    return answers_of({recipe: Scenario(recipe, some, (90, 200), engine) for recipe in RECIPES})


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_engine_loses_no_page_and_no_answer(recipe: str, engines: dict[str, Any]) -> None:
    engine, asks = result(engines, recipe), random_asks(random.Random(1))
    lengths = [len(tokens or []) for tokens in engine.tokens]
    whole = [length == ask.max_tokens for ask, length in zip(asks, lengths, strict=True)]
    assert all(ask.abort is not None or is_whole for ask, is_whole in zip(asks, whole, strict=True))
    answered = sum(whole)
    assert REQUESTS * 0.5 < answered < REQUESTS, "some must have been answered, and some aborted"
    assert sum(engine.preemptions) > 0
    assert engine.stats["events"] > 100 and engine.stats["blocks_freed"] > 100
    engine.check_nothing_left()


def test_a_server_loses_no_page_and_no_answer(tiny_and_tokenizer: Path) -> None:
    with served(tiny_and_tokenizer, RECIPES[1]) as (server, client):
        answered = asyncio.run(soak(server.url, seed=1))
        assert REQUESTS * 0.5 < answered < REQUESTS, "some must have been answered, and some hung up"
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
