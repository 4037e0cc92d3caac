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
CLASSES = {"FLASH_ATTN": "FlashKeepImpl", "TRITON_ATTN": "TritonKeepImpl"}


@pytest.mark.parametrize("backend", CLASSES)
def test_a_backend_for_gpus(backend: str, tiny: Path, tiny_oracle: Oracle) -> None:
    some, engine = asks(IDS, (300, 150, 517), 40), {"model": str(tiny), **CHUNKED}
    results = run(*(Scenario(recipe, some, engine=engine, backend=backend) for recipe in (*RECIPES, None)))
    for recipe, result in zip(RECIPES, results, strict=False):
        assert result.classes == [CLASSES[backend]]
        assert all(result.events)
        check_oracle(tiny_oracle, recipe, some, result)
    plain = results[-1]
    assert plain.classes == [CLASSES[backend].replace("Keep", "Attention")]
    assert not any(plain.stats.values())
