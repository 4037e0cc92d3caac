"""One engine computes prompts and another the answers; what travels between them is a file with the kept entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.vllm.compared import IDS, answers_of, result
from tests.vllm.conftest import TINY
from tests.vllm.contexts import serving
from tests.vllm.engine import Ask, Scenario
from tests.vllm.late import Late

owned = Late("keepset.vllm.contexts")

pytestmark = pytest.mark.full
RECIPES: dict[str, str | None] = {
    "once": "snapkv(window=8, keep=40)",
    "every": "snapkv(window=8, keep=40, every=16)",
    "protected": "snapkv(window=8, keep=40, every=16, protect_prompt=True)",
    "ragged": "adakv(snapkv(window=8), keep=48, every=24)",
    "biased": "match(adakv(snapkv(window=8)), keep=48)",
    "summed": "h2o(keep=48)",
    "remembered": "ams(snapkv(window=8), keep=48, every=16)",
    "whole": None,
}
PROMPTS = [IDS[:150], IDS[300:340], IDS[500:733]]
TOKENS = 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in RECIPES}


@pytest.fixture(scope="module")
def prefilled(tiny: Path, folders: dict[str, Path]) -> dict[Any, Any]:
    """Engines that compute the prompts and an answer's first token."""
    asks = [Ask(prompt, 1, extra={"keepset": {"save": f"handover-{index}"}}) for index, prompt in enumerate(PROMPTS)]
    return answers_of({name: serving(tiny, folders[name], asks, recipe, 10**7) for name, recipe in RECIPES.items()})


@pytest.fixture(scope="module")
def decoded(tiny: Path, folders: dict[str, Path], prefilled: dict[Any, Any]) -> dict[Any, Any]:
    """Engines that compute the rest, and engines that compute all."""
    scenarios: dict[Any, Scenario] = {}
    for name, recipe in RECIPES.items():
        first = result(prefilled, name).tokens
        asks = [
            Ask(prompt + (first[index] or []), TOKENS - 1, extra={"keepset": {"context": f"handover-{index}"}})
            for index, prompt in enumerate(PROMPTS)
        ]
        scenarios[name, "split"] = serving(tiny, folders[name], asks, recipe)
        whole = {"model": str(tiny), "max_model_len": 512, "num_gpu_blocks_override": 160, "max_num_batched_tokens": 64}
        scenarios[name, "one"] = Scenario(recipe, [Ask(prompt, TOKENS) for prompt in PROMPTS], engine=whole)
    return answers_of(scenarios)


@pytest.mark.parametrize("name", RECIPES)
def test_two_engines_answer_as_one(name: str, prefilled: dict[Any, Any], decoded: dict[Any, Any]) -> None:
    before, after, one = result(prefilled, name), result(decoded, (name, "split")), result(decoded, (name, "one"))
    for index, prompt in enumerate(PROMPTS):
        assert after.cached[index] == len(prompt)
        if name == "ragged" and len(prompt) < 48:
            continue  # one engine waits until an event drops a block
        assert [*(before.tokens[index] or []), *(after.tokens[index] or [])] == one.tokens[index]
        events = [(event["at"], event["layers"]) for event in [*before.events[index], *after.events[index]]]
        assert events == [(event["at"], event["layers"]) for event in one.events[index]]
    before.check_nothing_left()
    after.check_nothing_left()


def test_what_travels_are_the_kept_entries(prefilled: dict[Any, Any], folders: dict[str, Path]) -> None:
    """A key, a value and a position each, in 32 bits; beside them counts and a header."""
    result(prefilled, "every")
    files = owned.OwnedContexts(folders["every"], owned.EVERYBODY).newest()
    for index, prompt in enumerate(PROMPTS):
        kept = min(len(prompt), 40) * TINY.num_hidden_layers * TINY.num_key_value_heads
        file = files[f"handover-{index}"]
        with safe_open(file, "pt") as tensors:
            columns = [tensors.get_tensor(name).nbytes for name in tensors.keys() if ".columns." in name]  # noqa: SIM118
        assert sum(columns) == kept * (2 * TINY.head_dim + 1) * 4
        assert file.stat().st_size - sum(columns) < 4096
