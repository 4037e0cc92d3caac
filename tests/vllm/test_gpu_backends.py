"""The backends for GPUs, whole but for their kernels, which plain torch stands in for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.compared import CHUNKED, asks, check_oracle
from tests.vllm.engine import Scenario, run
from tests.vllm.oracle import Oracle
from tests.vllm.test_life import IDS

pytestmark = pytest.mark.full

RECIPES = [
    "snapkv(window=16, keep=96, every=24)",
    "adakv(snapkv(window=16), keep=96, every=17)",
    "expected_attention(keep=64, buffer=40, every=24)",
    "mass(share=0.8)",
]
EQUAL = ["snapkv(window=16, keep=96, every=24)", "pyramid(snapkv(window=16), keep=96)"]
"""Heads of a layer that keep equally many."""
BACKENDS = {
    "FLASH_ATTN": (RECIPES, "FlashKeepImpl", "FlashAttentionImpl"),
    "TRITON_ATTN": (RECIPES, "TritonKeepImpl", "TritonAttentionImpl"),
    "FLASHINFER": (EQUAL, "FlashInferKeepImpl", "FlashInferImpl"),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_for_gpus(backend: str, tiny: Path, tiny_oracle: Oracle) -> None:
    recipes, own, vllms = BACKENDS[backend]
    some, engine = asks(IDS, (300, 150, 517), 40), {"model": str(tiny), **CHUNKED}
    results = run(*(Scenario(recipe, some, engine=engine, backend=backend) for recipe in (*recipes, None)))
    for recipe, result in zip(recipes, results, strict=False):
        assert result.classes == [own]
        assert all(result.events)
        check_oracle(tiny_oracle, recipe, some, result)
    plain = results[-1]
    assert plain.classes == [vllms]
    assert not any(plain.stats.values())
    for index, ask in enumerate(some):
        tokens = plain.tokens[index]
        assert tokens is not None
        assert tiny_oracle.replay(None, ask.ids, tokens, plain.steps_of(index)).best == tokens
