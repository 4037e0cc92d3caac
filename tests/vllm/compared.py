"""What tests of engines against the reference and the transformers runtime have in common."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import keepset
from keepset import Recipe
from tests.paged.reference import newest_event
from tests.vllm.engine import Ask, Result, layers_of
from tests.vllm.oracle import Oracle

CHUNKED = {"max_num_batched_tokens": 256}

Embedded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def asks(essay: list[int], lengths: tuple[int, ...], tokens: int) -> list[Ask]:
    return [Ask(essay[137 * index : 137 * index + length], tokens) for index, length in enumerate(lengths)]


def result(answers: dict[Any, Any], key: object) -> Result:
    answer = answers[key]
    assert isinstance(answer, dict), answer
    return Result(**answer)


def check_oracle(oracle: Oracle, recipe: str, some: list[Ask], engine: Result) -> None:
    """What was produced and kept is what the reference does in the same steps."""
    for index, ask in enumerate(some):
        tokens = engine.tokens[index] or []
        assert ask.abort is not None or len(tokens) == ask.max_tokens
        replay = oracle.replay(Recipe.parse(recipe), ask.ids, tokens, engine.steps_of(index))
        assert replay.best == tokens
        assert engine.events_of(index) == replay.events
    engine.check_nothing_left()


@torch.no_grad()
def fed(
    model: PreTrainedModel, cache: keepset.Cache, recipe: Recipe, prompt: list[int], tokens: list[int]
) -> list[int]:
    """The best token after each of a request's tokens, fed in pieces that end where the recipe compresses."""
    best, ids, start = [], prompt + tokens[:-1], cache.get_seq_length()
    for stop in range(start + 1, len(ids) + 1):
        if stop in (len(prompt), len(ids)) or newest_event(recipe, len(prompt), start, stop) == stop:
            logits = model(torch.tensor([ids[start:stop]]), past_key_values=cache, use_cache=True).logits[0]
            best += logits.argmax(-1).tolist()[max(len(prompt) - 1 - start, 0) :]
            start = stop
    return best


def check_cache(cache: keepset.Cache, engine: Result, index: int) -> None:
    """The engine kept what the transformers runtime keeps; events that drop nothing do not exist under vLLM."""
    events = [event for event in cache.events if event.kept < event.entries]
    assert [event.length for event in events] == [event["at"] for event in engine.events[index]]
    for event, other in zip(events, engine.events[index], strict=True):
        for layer, heads in layers_of(other).items():
            for head, positions in enumerate(heads):
                assert event.keep_set.positions(layer, 0, head).tolist() == positions
