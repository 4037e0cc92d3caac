"""Decoding in CUDA graphs, pretended: no layer is called, and every token and entry is the reference's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.vllm.compared import CHUNKED, asks, check_oracle, check_transformers
from tests.vllm.engine import Ask, Scenario, run
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle
from tests.vllm.test_life import IDS
from tests.vllm.test_own_budgets import OWN
from tests.vllm.test_own_budgets import asks as own_asks

settings = Late("keepset.vllm.settings")

EQUAL = [
    "streaming_llm(keep=64, every=8)",
    "snapkv(window=16, keep=96, every=24)",
    "pyramid(snapkv(window=16), keep=96)",
    "expected_attention(keep=64, buffer=40, every=24)",
    "h2o(keep=0.3)",
]
RAGGED = [
    "adakv(snapkv(window=16), keep=96, every=17)",
    "mass(share=0.8)",
]

pytestmark = pytest.mark.full


BACKENDS = {"FLASH_ATTN": [*EQUAL, *RAGGED], "TRITON_ATTN": [*EQUAL, *RAGGED], "FLASHINFER": [*EQUAL[:3], RAGGED[0]]}
"""FlashInfer plans on the host what a replay attends to, before each."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_replayed_steps_are_the_reference(backend: str, tiny: Path, tiny_oracle: Oracle) -> None:
    """The last chunk of some prompts is one token, which may be replayed among decoding ones."""
    some = [*asks(IDS, (257, 150, 300), 40), Ask(IDS[50:307], 40, add=5), Ask(IDS[9:200], 30, add=9)]
    engine = {"model": str(tiny), "max_num_seqs": 8, **CHUNKED}
    recipes = BACKENDS[backend]
    scenarios = [Scenario(recipe, some, engine=engine, backend=backend, graphs=True) for recipe in recipes]
    for recipe, result in zip(recipes, run(*scenarios), strict=True):
        assert result.replays > 30
        assert all(result.events)
        check_oracle(tiny_oracle, recipe, some, result)


def test_so_they_are_under_model_runner_v2(tiny: Path, tiny_oracle: Oracle) -> None:
    """The default on GPUs, which captures and replays by itself; three requests fill a graph of four up."""
    some = [*asks(IDS, (257, 150), 30), Ask(IDS[9:200], 20, add=9)]
    engine = {"model": str(tiny), "max_num_seqs": 8, **CHUNKED}
    recipes = [EQUAL[1], RAGGED[0]]
    scenarios = [
        Scenario(recipe, some, engine=engine, backend="FLASH_ATTN", graphs=True, runner_v2=True) for recipe in recipes
    ]
    for recipe, result in zip(recipes, run(*scenarios), strict=True):
        assert result.replays > 20
        assert all(result.events)
        check_oracle(tiny_oracle, recipe, some, result)


def test_budgets_of_requests_own(tiny: Path) -> None:
    """Groups of layers are told apart also after vLLM has measured graphs with a cache made for that."""
    engine = {"model": str(tiny), "max_num_seqs": 8, **CHUNKED, "kv_transfer_config": settings.CONNECTOR}
    called = Scenario(EQUAL[1], own_asks(OWN), engine=engine, backend="FLASH_ATTN")
    (one,), (other,) = run(called), run(replace(called, graphs=True))
    assert other.replays > 30
    assert one.tokens == other.tokens and [one.events_of(i) for i in range(len(OWN))] == [
        other.events_of(i) for i in range(len(OWN))
    ]
    other.check_nothing_left()


def test_biases_are_added_in_replayed_steps(tiny: Path, tiny_model: PreTrainedModel) -> None:
    """The reference knows no biases: here it is the transformers runtime."""
    some, recipe = asks(IDS, (257, 150), 40), "match(snapkv(window=8), window=8, keep=40, every=12)"
    engine = {"model": str(tiny), "max_num_seqs": 8, **CHUNKED}
    (result,) = run(Scenario(recipe, some, engine=engine, backend="FLASH_ATTN", graphs=True))
    assert result.replays > 30
    check_transformers(tiny_model, recipe, some, result)
