"""Shared by tests of contexts: prompts, files, and engines that serve them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import keepset
from tests.vllm.compared import IDS
from tests.vllm.engine import Ask, Scenario
from tests.vllm.late import Late

settings = Late("keepset.vllm.settings")

OPENING, JOINT = IDS[3000:3003], [11, 12]
TOKENS = 24
ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "num_gpu_blocks_override": 160,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
}


def question(index: int, size: int) -> list[int]:
    return IDS[1000 + 101 * index : 1000 + 101 * index + size]


def ask(name: str, index: int, size: int, tokens: int = TOKENS, **more: Any) -> Ask:
    """A question to the context of this name."""
    return Ask(question(index, size), tokens, extra={"keepset": {"context": name}}, **more)


def write(
    folder: Path, model: PreTrainedModel, name: str, recipe: str, tokens: int, text: list[int] | None = None
) -> Path:
    """Writes a context of so many tokens; of a `text` its file has a digest."""
    cache = keepset.Cache(model, recipe)
    with torch.no_grad():
        model(torch.tensor([text or IDS[:tokens]]), past_key_values=cache)
    cache.save(folder / f"{name}.safetensors", force=True, token_ids=text, opening=len(OPENING), joint=JOINT)
    return folder / f"{name}.safetensors"


def serving(
    model: Path,
    folder: Path,
    asks: list[Ask],
    recipe: str | None = None,
    save: int | None = None,
    signed: bool = False,
    engine: dict[str, Any] | None = None,
    **more: Any,
) -> Scenario:
    """An engine that serves the contexts of a folder, and lets each owner save so many bytes."""
    additional: dict[str, Any] = {settings.CONTEXTS: str(folder), settings.SIGNED: signed}
    additional |= {settings.KEY: recipe} if recipe else {}
    additional |= {settings.SAVE_LIMIT: save} if save else {}
    own = {"model": str(model), "additional_config": additional, "kv_transfer_config": settings.CONTEXT_CONNECTOR}
    return Scenario(None, asks, engine=ENGINE | own | (engine or {}), **more)


@torch.no_grad()
def going_on(
    model: PreTrainedModel, path: Path, asked: list[int], tokens: list[int], steps: list[tuple[int, int]]
) -> list[int]:
    """The best token after each of the answer's, fed in the engine's steps; a preempted request begins again."""
    ids, best, cache = asked + tokens, dict[int, int](), keepset.Cache.load(path, model)
    begin = cache.get_seq_length()
    for first, number in steps:
        if first == begin:
            cache = keepset.Cache.load(path, model)
        new = ids[first - begin : first - begin + number]
        logits = model(torch.tensor([new]), past_key_values=cache, use_cache=True).logits[0]
        place = first + number - begin - len(asked)
        if 0 <= place < len(tokens) and place not in best:
            best[place] = int(logits[-1].argmax())
    return [best[place] for place in range(len(tokens))]
