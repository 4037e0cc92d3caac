"""Shared by tests of engines: what these are asked, and what they are held against."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama import modeling_llama

import keepset
from keepset import Recipe
from keepset.core.statistics import save
from tests.methods.naive import Shape, random_statistics
from tests.paged.reference import newest_event
from tests.vllm.conftest import TINY
from tests.vllm.engine import Ask, Result, Scenario, layers_of, raw
from tests.vllm.oracle import Oracle

IDS = torch.randint(3, 512, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
"""Tokens among which no two entries are as good for rounding to choose."""
CHUNKED = {"max_num_batched_tokens": 128}
NO_BINDING = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""The environment of engines with parts in other processes."""

Embedded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
Key = TypeVar("Key")


def full(values: Iterable[Any]) -> list[Any]:
    """The values as parameters of the full tier."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def asks(lengths: tuple[int, ...], tokens: int) -> list[Ask]:
    return [Ask(IDS[137 * index : 137 * index + length], tokens) for index, length in enumerate(lengths)]


def answers_of(scenarios: Mapping[Key, Scenario], env: dict[str, str] | None = None) -> dict[Key, Any]:
    """The answer of each engine, or the text of its error; all run in one process."""
    return dict(zip(scenarios, raw(*scenarios.values(), env=env), strict=True))


def result(answers: dict[Any, Any], key: object) -> Result:
    answer = answers[key]
    assert isinstance(answer, dict), answer
    return Result(**answer)


def networks_file(folder: Path, layers: int) -> Path:
    """Write a file of random statistics and networks for a model of so many layers with the tiny model's heads."""
    indices = tuple(range(layers))
    measured = random_statistics(Shape((1,), TINY.num_key_value_heads, 2, TINY.head_dim, TINY.head_dim), indices)
    path = folder / "networks.safetensors"
    save(replace(measured, provenance={"model": {"name": "tiny", "layers": list(indices)}}), path)
    return path


def rounding_model(folder: Path, rounded: Callable[[Tensor], Tensor], patch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Return a model whose keys, after rotation, and values are rounded, `[..., head_dim]`."""
    model, rotate = LlamaForCausalLM.from_pretrained(folder).eval(), modeling_llama.apply_rotary_pos_emb

    def rotated(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        query, key = rotate(*args, **kwargs)
        return query, rounded(key)

    def round_values(module: Any, args: Any, output: Tensor) -> Tensor:
        return rounded(output.unflatten(-1, (-1, model.config.head_dim))).flatten(-2)

    patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(round_values)
    return model


def own_recipe(engine: Recipe, ask: Ask) -> Recipe | None:
    """The recipe that a request is compressed by."""
    said = (ask.extra or {}).get("keepset", {})
    said = json.loads(said) if isinstance(said, str) else said
    if said.get("off"):
        return None
    ranges = (*engine.budget.protect, *said.get("protect", ()))
    own = {"keep": said.get("keep"), "bytes": said.get("bytes")} if said.keys() & {"keep", "bytes"} else {}
    return replace(engine, budget=replace(engine.budget, **own, protect=ranges))


def check_oracle(oracle: Oracle, recipe: str | None, some: list[Ask], engine: Result) -> None:
    """Check that tokens and kept entries are the reference's in the same steps; without a recipe all was kept."""
    for index, ask in enumerate(some):
        tokens = engine.tokens[index] or []
        assert ask.abort is not None or len(tokens) == ask.max_tokens
        replay = oracle.replay(
            recipe and own_recipe(Recipe.parse(recipe), ask), ask.ids, tokens, engine.steps_of(index)
        )
        # An engine that schedules ahead has computed one token more when a request is aborted, and delivers it no more.
        assert replay.best[: len(tokens)] == tokens
        assert len(replay.best) - len(tokens) in (0, 1 if ask.abort is not None else 0)
        assert engine.events_of(index) == replay.events
    engine.check_nothing_left()


def check_transformers(model: PreTrainedModel, recipe: str | Recipe, some: list[Ask], engine: Result) -> None:
    """Check that tokens and kept entries are the transformers runtime's. vLLM has no events that drop nothing."""
    for index, ask in enumerate(some):
        ids, tokens = ask.ids, engine.tokens[index]
        assert tokens is not None
        cache = keepset.Cache(model, recipe, prompt_length=len(ids), history=True)
        assert fed(model, cache, cache.recipe, ids, tokens) == tokens
        check_events(cache, engine, index)


def check_events(cache: keepset.Cache, engine: Result, index: int) -> None:
    """Check that a request's events kept what those of a cache did, in the same places."""
    events = [event for event in cache.events if event.kept < event.entries]
    assert [event.length for event in events] == [event["at"] for event in engine.events[index]]
    for event, other in zip(events, engine.events[index], strict=True):
        for layer, heads in layers_of(other).items():
            for head, positions in enumerate(heads):
                assert event.keep_set.positions(layer, 0, head).tolist() == positions


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
