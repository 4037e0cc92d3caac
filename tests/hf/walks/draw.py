"""What a walk is made of: an architecture, a recipe in its text form, and what a cache is made with."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

import keepset
from keepset.errors import KeepsetError
from keepset.recipe import check_schedule
from tests.hf.models import tiny

ARCHITECTURES = (
    *("llama", "llama_deep", "llama_shallow", "llama_mha", "llama_mqa", "llama_odd_head", "llama_yarn"),
    *("llama_groups_of_3", "llama_one_head", "qwen2", "qwen3", "phi3", "phi3_partial", "mistral", "mistral_window"),
    *("gemma3", "gemma2", "gpt_neox", "gpt_neox_partial", "stablelm", "glm4", "granite", "olmo2", "cohere", "cohere2"),
    *("starcoder2", "gpt2", "smollm3", "qwen3_moe", "mixtral", "olmoe", "gpt_oss"),
)
_EXPERTS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
"""Which expert a token is sent to may hang on the last bit, so no model of these is in bfloat16."""
_SCORERS = (
    *("streaming_llm", "random", "knorm", "keydiff", "lagkv", "tova", "snapkv", "rpc", "r_kv", "h2o"),
    *("expected_attention", "prompt_queries", "qfilter", "triattention", "distilled", "second_pass"),
)
WHOLE = ("duo_attention", "gvote", "kvcompose", "kvzip", "glance", "reread", "compilerkv")
"""Those that say themselves how much every head keeps."""
_ALLOCATORS = (
    *("uniform", "pyramid", "chunkkv", "adakv", "ams", "criticalkv", "zigzag", "dynamic", "composite", "pool"),
)


@dataclass(frozen=True)
class Plan:
    """What a walk is drawn to be about."""

    architecture: str
    half: bool
    recipe: str
    prompt: int
    padding: tuple[int, ...]
    in_chunks: bool
    history: bool
    task: tuple[int, ...] = ()

    @property
    def model(self) -> Any:
        return half_model(self.architecture) if self.half else tiny(self.architecture)

    def cache(self, prompt_length: int | None) -> keepset.Cache:
        task = torch.tensor([self.task]) if self.task else None
        return keepset.Cache(
            self.model, self.recipe, task_tokens=task, prompt_length=prompt_length, history=self.history
        )


@functools.cache
def half_model(name: str) -> Any:
    """A tiny model in bfloat16."""
    return copy.deepcopy(tiny(name)).to(torch.bfloat16)


def plan(draw: Random) -> Plan:
    """Draw a plan whose recipe is one."""
    architecture = draw.choice(ARCHITECTURES)
    recipe = _recipe(draw)
    text, rewrites = str(recipe), recipe.method.stage > 0
    prompt = draw.choice([1, 2, 5, draw.randint(3, 20), draw.randint(10, 45), draw.randint(20, 60)])
    rows = draw.choice([1, 1, 2, 3])
    padding = [draw.choice([0, draw.randint(0, prompt - 1)]) for _ in range(rows)]
    padding[draw.randrange(rows)] = 0
    task = ()
    if "second_pass" in text and draw.random() < 0.4:
        task = tuple(draw.randint(3, 199) for _ in range(draw.randint(1, 6)))
    return Plan(
        architecture=architecture,
        half=draw.random() < 0.1 and not rewrites and architecture not in _EXPERTS,
        recipe=text,
        prompt=prompt,
        padding=tuple(padding),
        in_chunks=draw.random() < 0.4,
        history=draw.random() < 0.75,
        task=task,
    )


def _recipe(draw: Random) -> keepset.Recipe:
    while True:
        text = _method(draw)
        if draw.random() < 0.15:
            window = f", window={draw.choice([0, 0, 3])}"
            text = f"match({text}, queries={draw.choice([4, 16])}{window}{draw.choice(['', ', biases=False'])})"
        if draw.random() < 0.15:
            text = f"quantized({text})"
        options = _options(draw)
        try:
            recipe = keepset.Recipe.parse(f"{text[:-1]}, {options})" if text.endswith(")") else f"{text}({options})")
            check_schedule(recipe.require_budget())
            return recipe
        except KeepsetError:
            continue  # another one: what goes together is not what a walk is about


def _method(draw: Random) -> str:
    if draw.random() < 0.2:
        return _scorer(draw, draw.choice(WHOLE))
    text = _scorer(draw, draw.choice(_SCORERS))
    for _ in range(draw.choice([0, 0, 1, 1, 2])):
        text = _allocator(draw, draw.choice(_ALLOCATORS), text)
    return text


def _scorer(draw: Random, name: str) -> str:
    window, kernel = f"window={draw.randint(1, 6)}", f"kernel={draw.choice([1, 3, 5])}"
    parameters = {
        "random": f"seed={draw.randint(0, 9)}",
        "lagkv": f"lag={draw.randint(2, 5)}, skip={draw.randint(0, 2)}",
        "snapkv": f"{window}, {kernel}",
        "rpc": f"{window}, {kernel}, aggregation={draw.choice(['group', 'all'])!r}",
        "r_kv": f"{window}, {kernel}, group={draw.choice(['mean', 'max'])!r}",
        "compilerkv": f"{window}, elastic=False, threshold='utility'",
        "expected_attention": f"future=8, skip={draw.randint(0, 3)}, buffer={draw.choice([1, 5, 11])}",
        "gvote": f"p_nuc={draw.choice([0.5, 0.95])}, future=8, skip={draw.randint(0, 2)}",
        "prompt_queries": f"stride={draw.choice([1, 3])}, second_pass={draw.random() < 0.2}",
        "second_pass": f"chunk={draw.choice([3, 128])}, statistic={draw.choice(['max', 'mean'])!r}",
        "kvcompose": f"structured={draw.random() < 0.5}",
        "kvzip": f"chunk={draw.choice([7, 2048])}, uniform={draw.random() < 0.3}",
        "triattention": "horizon=64",
    }.get(name, "")
    return f"{name}({parameters})"


def _allocator(draw: Random, name: str, inner: str) -> str:
    window = f"window={draw.randint(1, 6)}"
    parameters = {
        "pyramid": f", beta={draw.choice([2.0, 20.0])}",
        "chunkkv": f", chunk={draw.randint(1, 5)}",
        "adakv": f", floor={draw.choice([0.0, 0.2, 0.6])}",
        "ams": f", {window}, kernel=3, segment_mass=0.2, min_segment=2, max_segment=6",
        "zigzag": f", {window}, floor={draw.choice([0.0, 0.2])}",
        "dynamic": f", interval={draw.randint(1, 3)}",
        "composite": f", floor={draw.choice([0.0, 0.3])}",
        "pool": f", floor={draw.choice([0.0, 0.2])}",
    }.get(name, "")
    return f"{name}({inner}{parameters})"


def _options(draw: Random) -> str:
    options = [f"sinks={draw.choice([0, 0, 1, 3])}, recent={draw.choice([0, 0, 1, 4])}"]
    if draw.random() < 0.55:
        options.append(f"keep={draw.randint(1, 24)}, every={draw.choice([1, 2, 3, 5, 8, 13, 21])}")
        options += ["protect_prompt=True"] if draw.random() < 0.2 else []
        options += ["prefill=False"] if draw.random() < 0.15 else []
    else:
        options.append(f"keep={draw.choice([draw.randint(1, 30), round(draw.uniform(0.05, 1.0), 2), 1.0])}")
    if draw.random() < 0.15:
        first = draw.randint(0, 12)
        options.append(f"protect=[[{first}, {first + draw.randint(1, 6)}]]")
    return ", ".join(options)
