"""Put a load on a server and write down what happens."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from keepset.errors import KeepsetError
from keepset.serving.client import Reply, complete, connect
from keepset.serving.load import Load
from keepset.serving.metrics import Sample, take_sample
from keepset.serving.optional_imports import AsyncClient, import_http

SAMPLE_SECONDS = 0.5
"""Seconds between two looks at the metrics."""
_WARM_UP = 8


@dataclass
class Round:
    """One round of a load: its replies, and samples of the metrics from before its start to after its end.

    Attributes:
        seconds: from the first request to the end of the last answer.
        replies: in the order of the prompts.
    """

    seconds: float
    replies: list[Reply]
    samples: list[Sample]


@dataclass(frozen=True)
class ServedModel:
    """What a server says that it serves: the name for requests, where it has it from, and the tokens that it takes."""

    name: str
    root: str | None
    longest: int | None


def served_model(url: str) -> ServedModel:
    """What the server there serves; a `KeepsetError` where there is none that speaks OpenAI's language."""
    library = import_http()
    try:
        answer = library.get(f"{url}/v1/models", timeout=10.0, trust_env=False)
        answer.raise_for_status()
        model = answer.json()["data"][0]
        name, root, longest = str(model["id"]), model.get("root"), model.get("max_model_len")
    except (library.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        cause = str(error) if isinstance(error, library.HTTPError) else "it does not say what it serves"
        raise KeepsetError(f"There is no OpenAI-compatible server at {url} ({cause.splitlines()[0]}).") from error
    return ServedModel(
        name, root if isinstance(root, str) else None, longest if isinstance(longest, int) and longest > 0 else None
    )


def check_fits(load: Load, model: ServedModel) -> None:
    """Refuses a load of which the server would refuse every request, because it is longer than its context."""
    prompt = load.prompt_tokens + load.question_tokens
    if model.longest is not None and prompt + load.output_tokens > model.longest:
        raise KeepsetError(
            f"{prompt} tokens of prompt and {load.output_tokens} of output do not fit the server's "
            f"context of {model.longest}: ask for fewer, or give it a larger --max-model-len."
        )


def measure(
    url: str,
    model: str,
    load: Load,
    prompts: Sequence[list[list[int]]],
    on_reply: Callable[[], None] = lambda: None,
    contexts: Sequence[str] | None = None,
) -> list[Round]:
    """Warm the server up, then run every round of a load.

    Args:
        prompts: what `workload.prompts` gives.
        on_reply: is called with every answer.
        contexts: what the server calls the documents that a round's prompts begin with, if it has them saved.
    """

    async def run() -> list[Round]:
        async with connect(url, load.concurrency) as client:
            ask = partial(complete, client, model, timeout=load.timeout)
            warm_up, *rounds = prompts
            await ask(warm_up[0], min(_WARM_UP, load.output_tokens), index=0, began=time.perf_counter())
            return [await _run_round(client, ask, load, texts, on_reply, contexts) for texts in rounds]

    return asyncio.run(run())


async def _run_round(
    client: AsyncClient,
    ask: Callable[..., Awaitable[Reply]],
    load: Load,
    prompts: list[list[int]],
    on_reply: Callable[[], None],
    contexts: Sequence[str] | None,
) -> Round:
    replies: list[Reply] = []
    samples = [await take_sample(client, 0.0)]
    began = time.perf_counter()
    # A shared iterator is the queue: whoever is free takes the next prompt.
    queue = iter(enumerate(prompts))

    async def send() -> None:
        for index, prompt in queue:
            about = None if contexts is None else contexts[index]
            text = prompt if about is None else prompt[load.prompt_tokens :]
            replies.append(await ask(text, load.output_tokens, index=index, began=began, context=about))
            on_reply()

    async def watch() -> None:
        due = SAMPLE_SECONDS
        while True:
            await asyncio.sleep(due - (time.perf_counter() - began))
            now = time.perf_counter() - began
            samples.append(await take_sample(client, now))
            due = max(due + SAMPLE_SECONDS, now)

    watching = asyncio.create_task(watch())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency, len(prompts))):
                group.create_task(send())
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    samples.append(await take_sample(client, time.perf_counter() - began))
    replies.sort(key=lambda reply: reply.index)
    seconds = max(reply.end or 0.0 for reply in replies)
    return Round(seconds, replies, [sample for sample in samples if sample is not None])


def to_json(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Every reply and every sample."""
    return [
        {
            "seconds": each.seconds,
            "requests": [
                {
                    "index": reply.index,
                    "start": round(reply.start, 5),
                    "first_token_seconds": reply.first_token,
                    "seconds_per_token": reply.per_token,
                    "seconds": reply.total,
                    "prompt_tokens": reply.prompt_tokens,
                    "output_tokens": reply.output_tokens,
                    "error": reply.error,
                    "chunks": [round(chunk, 5) for chunk in reply.chunks],
                }
                for reply in each.replies
            ],
            "samples": [vars(sample) for sample in each.samples],
        }
        for each in rounds
    ]
