"""The backends for GPUs, whole but for their kernels, which plain torch stands in for."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepset import Recipe
from tests.vllm.engine import Ask, Scenario, run
from tests.vllm.oracle import Oracle

RECIPES = [
    "snapkv(window=16, keep=96, every=24)",
    "adakv(snapkv(window=16), keep=96, every=17)",
    "expected_attention(keep=64, buffer=40, every=24)",
    "mass(share=0.8)",
]
CLASSES = {"FLASH_ATTN": "FlashKeepImpl", "TRITON_ATTN": "TritonKeepImpl"}


@pytest.mark.parametrize("backend", CLASSES)
def test_a_backend_for_gpus(backend: str, essay: list[int], shallow: Path, shallow_oracle: Oracle) -> None:
    some = [Ask(essay[137 * index :][:length], 40) for index, length in enumerate((300, 150, 517))]
    engine = {"model": str(shallow), "max_num_batched_tokens": 256}
    results = run(*(Scenario(recipe, some, engine=engine, backend=backend) for recipe in (*RECIPES, None)))
    for recipe, result in zip(RECIPES, results, strict=False):
        assert result.classes == [CLASSES[backend]]
        for index, ask in enumerate(some):
            tokens = result.tokens[index]
            assert tokens is not None and len(tokens) == ask.max_tokens
            replay = shallow_oracle.replay(Recipe.parse(recipe), ask.ids, tokens, result.steps_of(index))
            assert replay.best == tokens
            assert result.events_of(index) == replay.events
            assert replay.events
        result.check_nothing_left()
    plain = results[-1]
    assert plain.classes == [CLASSES[backend].replace("Keep", "Attention")]
    assert not any(plain.stats.values())
