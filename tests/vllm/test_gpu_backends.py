"""The backends for GPUs, whole but for their kernels, which plain torch stands in for."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.vllm.compared import CHUNKED, asks, check_oracle, check_transformers
from tests.vllm.engine import Ask, Scenario, run
from tests.vllm.oracle import Oracle
from tests.vllm.test_life import IDS

pytestmark = pytest.mark.full

RECIPES = [
    "snapkv(window=16, keep=96, every=24)",
    "adakv(snapkv(window=16), keep=96, every=17)",
    "expected_attention(keep=64, buffer=40, every=24)",
    "mass(share=0.8)",
    "pyramid(snapkv(window=16), keep=96)",
]
LAYOUTS = [RECIPES[0], RECIPES[1], RECIPES[-1]]
BACKENDS = {
    "FLASH_ATTN": ("FlashKeepImpl", "FlashAttentionImpl", RECIPES),
    "TRITON_ATTN": ("TritonKeepImpl", "TritonAttentionImpl", LAYOUTS),
    "FLASHINFER": ("FlashInferKeepImpl", "FlashInferImpl", LAYOUTS),
}
"""Of two a recipe of each layout: what it looks at is no concern of a backend."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_for_gpus(backend: str, tiny: Path, tiny_oracle: Oracle) -> None:
    own, vllms, recipes = BACKENDS[backend]
    some, engine = asks(IDS, (300, 150, 517), 40), {"model": str(tiny), **CHUNKED}
    results = run(*(Scenario(recipe, some, engine=engine, backend=backend) for recipe in (*recipes, None)))
    for recipe, result in zip(recipes, results, strict=False):
        assert result.classes == [own]
        assert all(result.events)
        check_oracle(tiny_oracle, recipe, some, result)
    plain = results[-1]
    assert plain.classes == [vllms]
    assert not any(plain.stats.values())
    check_oracle(tiny_oracle, None, some, plain)


def test_ragged_heads_by_keepsets_own_kernels(tiny: Path, tiny_oracle: Oracle, tiny_model: PreTrainedModel) -> None:
    """In Triton's interpreter, one at a time and beside prompts, after events and before, and preempted once.

    Of biases the reference knows nothing: there the transformers runtime is it.
    """
    some = [Ask(IDS[200 * i : 200 * i + n], 24, add=add) for i, (n, add) in enumerate([(130, 0), (70, 0), (230, 9)])]
    engine = {"model": str(tiny), "max_num_batched_tokens": 96, "block_size": 16}
    recipe, biased = (
        "adakv(snapkv(window=8), keep=40, every=12)",
        "match(snapkv(window=8), window=8, keep=40, every=12)",
    )
    plain, fitted = run(
        Scenario(recipe, some, preempt=(14,), engine=engine, backend="FLASH_ATTN", triton=True),
        Scenario(biased, some, engine=engine, backend="FLASH_ATTN", triton=True),
    )
    for result in (plain, fitted):
        assert result.classes == ["FlashKeepImpl"] and all(result.events)
    assert sum(plain.preemptions) > 1
    check_oracle(Oracle(tiny_oracle.model, 16), recipe, some, plain)
    check_transformers(tiny_model, biased, some, fitted)
