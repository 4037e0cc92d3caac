"""The backends for GPUs, whole but for their kernels, which plain torch stands in for.

In pretended CUDA graphs no layer is called. Every token and entry is the reference's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.vllm.compared import CHUNKED, IDS, asks, check_oracle, check_transformers
from tests.vllm.engine import Ask, Scenario, run
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle
from tests.vllm.test_own_budgets import OWN
from tests.vllm.test_own_budgets import asks as own_asks
from tests.vllm.test_own_budgets import check as check_own
from tests.vllm.test_tiny import EQUAL, FROM_DATA, LAYERS_DIFFER, MOMENTS, RAGGED

pytestmark = pytest.mark.full
settings = Late("keepset.vllm.settings")

BIASED = "match(snapkv(window=8), window=8, keep=40, every=12)"
IMPLS = {"FLASH_ATTN": "FlashKeepImpl", "TRITON_ATTN": "TritonKeepImpl", "FLASHINFER": "FlashInferKeepImpl"}
CALLED = {"FLASH_ATTN": [EQUAL, RAGGED], "TRITON_ATTN": [EQUAL], "FLASHINFER": [LAYERS_DIFFER]}
REPLAYED = {
    "FLASH_ATTN": [EQUAL, RAGGED, MOMENTS, FROM_DATA],
    "TRITON_ATTN": [EQUAL, RAGGED],
    "FLASHINFER": [EQUAL, RAGGED, LAYERS_DIFFER],
}
"""FlashInfer plans on the host what a replay attends to, before each. What a recipe looks at is no concern of a
backend."""


def engine(tiny: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(tiny), "max_num_seqs": 8, **CHUNKED, **more}


@pytest.mark.parametrize("backend", IMPLS)
def test_called_steps_are_the_reference(backend: str, tiny: Path, tiny_oracle: Oracle) -> None:
    some, recipes = asks((130, 70, 230), 24), CALLED[backend]
    results = run(*(Scenario(recipe, some, engine=engine(tiny), backend=backend) for recipe in recipes))
    for recipe, each in zip(recipes, results, strict=True):
        assert each.classes == [IMPLS[backend]]
        assert all(each.events)
        check_oracle(tiny_oracle, recipe, some, each)


@pytest.mark.parametrize("backend", IMPLS)
def test_replayed_steps_are_the_reference(
    backend: str, tiny: Path, tiny_oracle: Oracle, tiny_model: PreTrainedModel
) -> None:
    """The last chunk of some prompts is one token, which may be replayed among decoding ones.

    Groups of layers are told apart also after vLLM has measured graphs with a cache made for that. Of biases the
    reference knows nothing: there the transformers runtime is it.
    """
    some = [*asks((129, 90, 200), 30), Ask(IDS[50:179], 30, add=5), Ask(IDS[9:100], 20, add=9)]
    recipes, own, fitted = REPLAYED[backend], own_asks(OWN), asks((129, 90), 30)
    scenarios = [Scenario(recipe, some, engine=engine(tiny)) for recipe in recipes]
    if backend == "FLASH_ATTN":
        connected = engine(tiny, kv_transfer_config=settings.CONNECTOR)
        scenarios += [Scenario(EQUAL, own, engine=connected), Scenario(BIASED, fitted, engine=engine(tiny))]
    results = run(*(Scenario(**vars(each) | {"backend": backend, "graphs": True}) for each in scenarios))
    for each in results:
        assert each.replays > 10 and any(each.events)
    for recipe, each in zip(recipes, results, strict=False):
        check_oracle(tiny_oracle, recipe, some, each)
    if backend == "FLASH_ATTN":
        check_own(EQUAL, own, results[-2], tiny_model, tiny_oracle)
        check_transformers(tiny_model, BIASED, fitted, results[-1])


def test_ragged_heads_by_keepsets_own_kernels(tiny: Path, tiny_oracle: Oracle, tiny_model: PreTrainedModel) -> None:
    """In Triton's interpreter, one at a time and beside prompts, after events and before, and preempted once."""
    some = [Ask(IDS[200 * i : 200 * i + n], 14, add=add) for i, (n, add) in enumerate([(130, 0), (70, 0), (100, 7)])]
    small: dict[str, Any] = engine(tiny, max_num_batched_tokens=96, block_size=16)
    plain, fitted = run(
        Scenario(RAGGED, some, preempt=(10,), engine=small, backend="FLASH_ATTN", triton=True),
        Scenario(BIASED, some, engine=small, backend="FLASH_ATTN", triton=True),
    )
    for each in (plain, fitted):
        assert each.classes == ["FlashKeepImpl"] and all(each.events)
    assert sum(plain.preemptions) > 1
    check_oracle(Oracle(tiny_oracle.model, 16), RAGGED, some, plain)
    check_transformers(tiny_model, BIASED, some, fitted)
